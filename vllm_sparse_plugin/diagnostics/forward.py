"""Queries, keys and values of a model's forward pass, and what a policy selects of them.

The pass runs in transformers with dense attention everywhere, so every selection is judged by itself: earlier ones have
not changed what a layer sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sparse_kernels.page_statistics import update_page_statistics
from sparse_kernels.paging import PagedTensor

from vllm_sparse_plugin.diagnostics.quality import Quality, measure
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.policies import Selection

_ATTENTION = "vllm_sparse_capture"


@dataclass(frozen=True)
class LayerInputs:
    """What one layer's attention saw of one prompt."""

    query: torch.Tensor
    """`[num_queries, num_kv_heads, group_size, head_size]`, the newest tokens."""
    keys: torch.Tensor
    """`[num_kv_heads, num_tokens, head_size]`, with positions."""
    values: torch.Tensor
    """`[num_kv_heads, num_tokens, head_size]`."""
    scale: float
    """Factor of the logits."""

    @property
    def context_lens(self) -> torch.Tensor:
        """Tokens that each query attends to, itself included: `[num_queries]` int64."""
        tokens, queries = self.keys.shape[1], self.query.shape[0]
        return torch.arange(tokens - queries + 1, tokens + 1, device=self.keys.device)


def load(folder: Path, device: str) -> Callable[[list[int], int], list[LayerInputs | None]]:
    """Loads a model and returns what runs it.

    Args:
        folder: the model's.
        device: torch's name of the device.

    Returns:
        A function of token ids and a number of newest tokens whose queries are kept; it returns the layers in order,
        None for one of sliding-window attention.

    Raises:
        ConfigurationError: if transformers cannot load the model; from the function, if its attention is of a form
            that is not reproduced here.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    layers: list[LayerInputs | None] = []
    newest = 0

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if kwargs.get("s_aux") is not None or kwargs.get("softcap"):
            raise ConfigurationError(
                f"model: got {folder.name!r} with learned attention sinks or capped logits, allowed: models without; "
                "diagnostics.sample_every measures all on a server"
            )
        # [query heads, queries, size] to [queries, KV heads, group, size]
        kept = query[0, :, -newest:].unflatten(0, (key.shape[1], -1)).permute(2, 0, 1, 3).contiguous()
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        layers.append(None if kwargs.get("sliding_window") else LayerInputs(kept, key[0], value[0], scale))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(_ATTENTION, attend)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=_ATTENTION, dtype=torch.bfloat16)
        model.to(device).eval()
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"model: got {folder.name!r} ({reason}), allowed: one of transformers") from None

    def run(tokens: list[int], queries: int) -> list[LayerInputs | None]:
        nonlocal newest
        newest = queries
        layers.clear()
        with torch.inference_mode():
            model(torch.tensor([tokens], device=device), use_cache=False, logits_to_keep=1)
        return list(layers)

    return run


class PagedLayer:
    """A layer's inputs in a paged cache with a policy's statistics, as a server has them."""

    def __init__(self, layer: LayerInputs, selection: Selection) -> None:
        self.layer = layer
        self.selection = selection
        head_size, dtype = layer.keys.shape[2], layer.keys.dtype
        layout = selection.statistics_layout(head_size, dtype.itemsize)
        block_size = math.lcm(selection.page_size, layout.unit_tokens if layout else 1)
        keys = in_blocks(layer.keys, block_size, selection.page_size)
        self.paged_keys = keys
        self.paged_values = in_blocks(layer.values, block_size, selection.page_size)
        blocks, heads = keys.view.shape[:2]
        device = layer.keys.device
        self.block_table = torch.arange(blocks, device=device).expand(len(layer.query), -1)
        self.statistics = None
        if layout is not None:
            rows = torch.zeros(blocks, heads, layout.rows(block_size), 2 * head_size, dtype=dtype, device=device)
            self.statistics = layout.views(rows, block_size)
            page = torch.arange(layer.keys.shape[1] // selection.page_size, device=device)
            update_page_statistics(keys, self.statistics, page // keys.pages_per_block, page % keys.pages_per_block)

    def quality(self, selection: Selection | None = None) -> Quality:
        """What the selection gets of dense attention.

        Args:
            selection: another than the one whose statistics these are, that differs in its budget.
        """
        layer, selection = self.layer, selection or self.selection
        num_pages = layer.context_lens // selection.page_size
        pages = selection.select(layer.query, self.statistics, self.block_table, num_pages)
        return measure(
            layer.query, layer.keys, layer.values, layer.context_lens, pages, selection.page_size, layer.scale
        )


def in_blocks(rows: torch.Tensor, block_size: int, page_size: int) -> PagedTensor:
    """Rows `[num_kv_heads, num_tokens, head_size]` in as many blocks as they fill, one after the other."""
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[1] % block_size))
    return PagedTensor.from_rows(padded.unflatten(1, (-1, block_size)).transpose(0, 1), page_size)
