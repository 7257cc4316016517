"""Captures queries, keys and values of a model's forward pass, and measures a policy's selection of them.

The forward pass runs in transformers with dense attention in all layers. Each selection is judged separately: no
earlier selection changes the inputs of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console
from sparse_kernels.page_statistics import update_page_statistics
from sparse_kernels.paging import PagedTensor

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.progress import show_progress
from vllm_sparse_plugin.tools.models import attends_in_chunks, explain_load, keeps_keys_alone, load_causal_lm, name_of

if TYPE_CHECKING:
    from vllm_sparse_plugin.policies import Selection

SINK_MASS = 0.5
"""A group is a sink group if its attention weight on token 0, mean over its heads, reaches this value. The paper states
a little more than 0.4; its text does not say how the heads of a group are combined."""


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of one layer's attention for one prompt."""

    query: torch.Tensor
    """`[num_queries, num_kv_heads, group_size, head_size]`, the newest tokens."""
    keys: torch.Tensor
    """`[num_kv_heads, num_tokens, head_size]`, with positions."""
    values: torch.Tensor
    """`[num_kv_heads, num_tokens, head_size]`."""
    scale: float
    """Factor of the logits."""

    def weights(self, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return attention weights: `[num_queries, num_kv_heads, group_size, num_tokens]` float32.

        Args:
            mask: `[num_queries, num_tokens]` bool, tokens that each query attends to; None for all up to itself.
        """
        logits = torch.einsum("qhgd,hnd->qhgn", self.query.float(), self.keys.float()) * self.scale
        if mask is None:
            mask = torch.arange(self.keys.shape[1], device=logits.device) < self.context_lens[:, None]
        return logits.masked_fill(~mask[:, None, None], -torch.inf).softmax(dim=-1)

    def page_weights(self, page_size: int) -> torch.Tensor:
        """Return the attention weight on each page, mean over the group: `[num_queries, num_kv_heads, num_pages]`.

        Args:
            page_size: tokens of a page. The last page may be incomplete.
        """
        weights = self.weights().mean(dim=2)
        padded = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % page_size))
        of_pages: torch.Tensor = padded.unflatten(-1, (-1, page_size)).sum(dim=-1)
        return of_pages

    @property
    def context_lens(self) -> torch.Tensor:
        """Number of tokens that each query attends to, itself included: `[num_queries]` int64."""
        tokens, queries = self.keys.shape[1], self.query.shape[0]
        return torch.arange(tokens - queries + 1, tokens + 1, device=self.keys.device)


Skip = Callable[[int, LayerInputs], torch.Tensor]
"""Takes a layer's index and inputs. Returns the groups to skip: `[num_queries, num_kv_heads]` bool."""


class Decoded(NamedTuple):
    """Result of decoding given tokens."""

    layers: list[LayerInputs | None]
    """Attention inputs of every layer; None for a layer of a window or of chunks, or one without attention."""
    predictions: list[int]
    """The likeliest token after each token."""


class CapturingModel:
    """A transformers model whose attention layers capture their inputs."""

    def __init__(self, folder: Path, device: str) -> None:
        """Load a model.

        Args:
            folder: of the model.
            device: torch's name of the device.

        Raises:
            ConfigurationError: transformers cannot load the model. At run time: its form of attention is not supported.
        """
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        # Each model has a unique name, because transformers looks the function up by name at every call.
        attention = f"vllm_sparse_capture_{id(self)}"
        AttentionInterface.register(attention, self._attend)
        # Without its mask a layer of a window would attend to everything.
        AttentionMaskInterface.register(attention, sdpa_mask)
        model = load_causal_lm(folder, attention, torch.bfloat16)
        with explain_load(folder):
            model.to(device).eval()
        self._model = model
        self._device = device
        self._name = name_of(folder)
        self._layers: list[LayerInputs | None] = []
        self._newest = 0
        self._skip: Skip | None = None

    def run(self, tokens: list[int], queries: int) -> list[LayerInputs | None]:
        """Run one text.

        Args:
            tokens: its ids.
            queries: number of newest tokens whose queries are kept.

        Returns:
            The layers in order; None for a layer of a window or of chunks, or one without attention.
        """
        self._forward(tokens, queries, None, use_cache=False, logits_to_keep=1)
        return list(self._layers)

    def prefill(self, tokens: list[int]) -> Any:
        """Run the beginning of a text densely. Return transformers' cache."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        self._forward(tokens, 1, None, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def decode(self, cache: Any, tokens: list[int], skip: Skip | None = None) -> Decoded:
        """Run the rest of a text as if its tokens were decoded one by one. The cache stays unchanged.

        Args:
            cache: of the beginning.
            tokens: ids of the rest.
            skip: returns the groups of a layer whose output is set to zero.
        """
        before = [_copied(layer) for layer in cache.layers]
        # With several tokens, state-space layers of some models (Jamba) ignore the state before them.
        at_once = len(tokens) if all(map(keeps_keys_alone, cache.layers)) else 1
        passes: list[list[LayerInputs | None]] = []
        predictions: list[int] = []
        for first in range(0, len(tokens), at_once):
            part = tokens[first : first + at_once]
            logits = self._forward(part, len(part), skip, past_key_values=cache, use_cache=True)
            passes.append(list(self._layers))
            predictions += logits[0].argmax(dim=-1).tolist()
        # A layer of a window cannot remove tokens: it has forgotten those before.
        cache.layers[:] = before
        return Decoded([_joined(parts) for parts in zip(*passes, strict=True)], predictions)

    def _forward(self, tokens: list[int], newest: int, skip: Skip | None, **options: Any) -> torch.Tensor:
        self._newest, self._skip = newest, skip
        self._layers.clear()
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([tokens], device=self._device), **options).logits
        return logits

    def _attend(self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if kwargs.get("s_aux") is not None or kwargs.get("softcap"):
            raise ConfigurationError(
                f"model: got {self._name!r} with learned attention sinks or capped logits, allowed: models without them"
            )
        # Queries go from [query heads, queries, size] to [queries, KV heads, group, size].
        newest = query[0, :, -self._newest :].unflatten(0, (key.shape[1], -1)).permute(2, 0, 1, 3).contiguous()
        is_local = bool(kwargs.get("sliding_window")) or attends_in_chunks(module)
        inputs = LayerInputs(newest, key[0], value[0], kwargs.get("scaling") or query.shape[-1] ** -0.5)
        # Layers of another kind do not call this.
        self._layers += [None] * (module.layer_idx - len(self._layers))
        self._layers.append(None if is_local else inputs)
        if query.shape[2] == key.shape[2]:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        mask = None if attention_mask is None else attention_mask[0, 0]
        output = torch.einsum("qhgn,hnd->qhgd", inputs.weights(mask), value[0].float())
        if self._skip is not None and not is_local:
            output[self._skip(len(self._layers) - 1, inputs)] = 0
        return output.flatten(1, 2).to(query.dtype)[None], None


def _joined(parts: Sequence[LayerInputs | None]) -> LayerInputs | None:
    """Return one layer's inputs of consecutive passes as those of one pass."""
    found = [part for part in parts if part is not None]
    return replace(found[-1], query=torch.cat([part.query for part in found])) if found else None


def _copied(layer: Any) -> Any:
    """Return a copy of a layer's cache that later tokens leave unchanged."""
    return copy(layer) if keeps_keys_alone(layer) else deepcopy(layer)


@contextmanager
def captured_model(
    folder: Path, device: str, num_tokens: int, console: Console
) -> Iterator[tuple[CapturingModel, Callable[[float], None]]]:
    """Load a model, and show the progress of running it.

    Args:
        folder: of the model.
        device: torch's name of the device.
        num_tokens: tokens of all texts.
        console: shows the progress.

    Yields:
        The model, and a function that takes the tokens of each finished text.

    Raises:
        ConfigurationError: see `CapturingModel`.
    """
    with show_progress(console, f"Loading {name_of(folder)}"):
        model = CapturingModel(folder, device)
    with show_progress(console, f"Running the model over {num_tokens:,} tokens", num_tokens) as advance:
        yield model, lambda tokens: advance(None, tokens)


class PagedLayer:
    """A layer's inputs in a paged cache with a policy's statistics, as on a server."""

    def __init__(self, layer: LayerInputs, selection: Selection) -> None:
        self.layer = layer
        self.selection = selection
        head_size, dtype = layer.keys.shape[2], layer.keys.dtype
        layout = selection.statistics_layout(head_size, dtype.itemsize)
        block_size = math.lcm(selection.page_size, layout.unit_tokens if layout else 1)
        keys = in_blocks(layer.keys, block_size, selection.page_size)
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
        """Compare the selection with dense attention.

        Args:
            selection: a selection with another budget; its statistics must be the same.
        """
        layer, selection = self.layer, selection or self.selection
        pages = self._pages(selection)
        quality = measure(
            layer.query, layer.keys, layer.values, layer.context_lens, pages, selection.page_size, layer.scale
        )
        # Without a complete page the oracle selects none, so no page is missing.
        return quality._replace(
            recall=quality.recall.masked_fill(layer.context_lens[:, None] < selection.page_size, 1.0)
        )

    def read(self) -> torch.Tensor:
        """Return the pages that each query reads, with the incomplete page: `[num_queries, num_kv_heads, num_pages]`
        bool."""
        layer, page_size = self.layer, self.selection.page_size
        num_pages = -(-layer.keys.shape[1] // page_size)
        chosen, incomplete = chosen_pages(self._pages(self.selection), layer.context_lens, page_size, num_pages)
        return chosen | incomplete

    def _pages(self, selection: Selection) -> torch.Tensor:
        num_pages = self.layer.context_lens // selection.page_size
        return selection.select(self.layer.query, self.statistics, self.block_table, num_pages)


class Quality(NamedTuple):
    """Comparison of a selection with dense attention, per query token and KV head; means over the group."""

    mass: torch.Tensor
    """`[num_queries, num_kv_heads]` float32: share of the attention weight that is on the tokens read."""
    oracle_mass: torch.Tensor
    """The same for the oracle, which reads as many complete pages: those of the largest true weight."""
    recall: torch.Tensor
    """Share of the oracle's pages that are read."""
    cosine: torch.Tensor
    """Cosine of the outputs of sparse and dense attention."""


def chosen_pages(
    pages: torch.Tensor, context_lens: torch.Tensor, page_size: int, num_pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the complete pages that query tokens read, `[num_queries, num_kv_heads, num_pages]` bool, and the
    incomplete page that each also reads, `[num_queries, 1, num_pages]` bool.

    Arguments are those of `measure`, and at least the number of pages of the longest context.
    """
    page, complete = torch.arange(num_pages, device=pages.device), (context_lens // page_size)[:, None, None]
    # Entries of -1 go to an extra place behind all pages.
    chosen = torch.zeros(*pages.shape[:2], num_pages + 1, dtype=torch.bool, device=pages.device)
    chosen = chosen.scatter(2, torch.where(pages < 0, num_pages, pages).long(), True)[..., :num_pages]
    return chosen & (page < complete), page == complete


def measure(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context_lens: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    scale: float,
) -> Quality:
    """Compares attention over selected pages with dense attention.

    In addition to the selected pages every query reads its incomplete last page. All arithmetic is in float32.

    Args:
        query: `[num_queries, num_kv_heads, group_size, head_size]`, any float dtype.
        keys: `[num_kv_heads, num_tokens, head_size]`, a text from its first token on.
        values: like `keys`; finite.
        context_lens: `[num_queries]` integer, tokens that each query attends to, itself included; at least 1.
        pages: `[num_queries, num_kv_heads, k]` integer, complete pages that are read, -1 for none.
        page_size: tokens per page.
        scale: of the products of queries and keys.
    """
    tokens = keys.shape[1]
    logits = torch.einsum("qhgd,hnd->qhgn", query.float(), keys.float()) * scale
    beyond = torch.arange(tokens, device=keys.device) >= context_lens[:, None, None, None]
    logits = logits.masked_fill(beyond, -torch.inf)
    chosen, incomplete = chosen_pages(pages, context_lens, page_size, -(-tokens // page_size))
    weights = logits.softmax(dim=-1)
    mass = torch.nn.functional.pad(weights, (0, -tokens % page_size)).unflatten(-1, (-1, page_size)).sum(-1).mean(2)
    # The oracle takes as many complete pages as were chosen; ties go to the lowest page.
    page = torch.arange(mass.shape[-1], device=keys.device)
    complete = page < (context_lens // page_size)[:, None, None]
    best = mass.masked_fill(~complete, -1.0).sort(dim=-1, descending=True, stable=True).indices
    oracle = torch.zeros_like(chosen).scatter(2, best, page < chosen.sum(dim=-1, keepdim=True))
    read = chosen | incomplete
    by_token = read.repeat_interleave(page_size, dim=-1)[..., :tokens]
    sparse = logits.masked_fill(~by_token[:, :, None], -torch.inf).softmax(dim=-1)
    sparse_output, dense_output = (torch.einsum("qhgt,htd->qhgd", part, values.float()) for part in (sparse, weights))
    return Quality(
        (mass * read).sum(dim=-1),
        (mass * (oracle | incomplete)).sum(dim=-1),
        (oracle & chosen).sum(dim=-1) / oracle.sum(dim=-1).clamp(min=1),
        torch.nn.functional.cosine_similarity(sparse_output, dense_output, dim=-1).mean(dim=2),
    )


def in_blocks(rows: torch.Tensor, block_size: int, page_size: int) -> PagedTensor:
    """Return rows `[num_kv_heads, num_tokens, head_size]` in consecutive blocks."""
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[1] % block_size))
    return PagedTensor.from_rows(padded.unflatten(1, (-1, block_size)).transpose(0, 1), page_size)
