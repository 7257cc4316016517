"""Attention of a model in training: a transformers attention function with a page mask, or dense."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from sparse_kernels.batch import PageSelection
from sparse_kernels.masked_attention import (
    TRAINABLE,
    Packing,
    PageMask,
    PageRecords,
    dense_shares,
    masked_attention,
    newest_attention,
    page_records,
    selection_loss,
)
from sparse_kernels.masked_attention.packing import Sequence
from sparse_kernels.page_statistics import StatisticsLayout
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from vllm_sparse_plugin.config import KEY, ResolvedConfig
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.policies import UniqueSelection
from vllm_sparse_plugin.tools.models import attends_in_chunks

_CACHE_ITEMSIZE = 2
"""Models are trained for a 16-bit KV cache."""
_LOGITS_AT_ONCE = 1 << 27
"""Logits of all heads for the tokens after a prompt: 512 MB in float32. A pass needs a few times as much."""
_LENGTHS_ON_A_GPU = 256
"""On a GPU, dense attention pads longer sequences to a multiple of this length. For each new length cuDNN makes a
plan on the host, forward and backward, which takes longer than the attention of a small model."""


@dataclass(frozen=True)
class ServedSelection:
    """The selection of serving, in the form that layers in training need."""

    selection: UniqueSelection
    first_dense_layers: int
    min_context_tokens: int

    @classmethod
    def of(cls, config: ResolvedConfig) -> ServedSelection:
        """Return the selection of a configuration.

        Raises:
            ConfigurationError: models cannot be trained with it.
        """
        selection = config.selection
        if not isinstance(selection, UniqueSelection):
            raise ConfigurationError(
                f"{KEY}.selection.policy: got {selection.name()!r}, allowed: 'unique' for training"
            )
        statistics = selection.statistics_in(_CACHE_ITEMSIZE)
        if selection.statistics_layout(64, _CACHE_ITEMSIZE).kind.name not in TRAINABLE:
            raise ConfigurationError(
                f"{KEY}.selection.statistics: got {statistics!r}, allowed for training: quarters, int8, fp8 or bf16"
            )
        explicit = selection.model_copy(update={"statistics": statistics})
        return cls(explicit, config.config.first_dense_layers, config.config.min_context_tokens)

    def layout(self, head_size: int) -> StatisticsLayout:
        """Return the kind and format of the page statistics."""
        return self.selection.statistics_layout(head_size, _CACHE_ITEMSIZE)

    def mask(self, temperature: float | None, budget_tokens: int | None = None) -> PageMask:
        """Return the mask of a step.

        Args:
            temperature: T; None for the hard mask.
            budget_tokens: replaces the served budget.
        """
        served: PageSelection = self.selection.page_selection()
        if budget_tokens is not None:
            served = replace(served, k=budget_tokens // self.selection.page_size)
        return PageMask(served, self.selection.page_size, temperature, max(self.min_context_tokens - 1, 0))


Shares = dict[int, list[torch.Tensor]]
"""Share of dense attention on each page, by layer and for each part of the decoded tokens: see `dense_shares`."""


class _Pass(NamedTuple):
    """What a forward pass and its backward pass attend to."""

    packing: Packing
    """The sequences of a row."""
    mask: PageMask | None = None
    """None for dense attention."""
    prompts: tuple[int, ...] | None = None
    """Number of first tokens of each sequence that attend densely with any mask, like a prefill."""
    is_exact: bool = False
    """Whether decoded tokens attend under the hard mask, with the gradients of the soft mask."""
    shares: Shares | None = None
    """Without a mask, receives what decoded tokens read; with a mask, the target for the scores."""


class PackedAttention:
    """The attention function of a model's layers, while a packing is set."""

    def __init__(self, served: ServedSelection, model_name: str, checkpointing: bool = True) -> None:
        """Register the function with transformers under a unique name.

        Args:
            served: the selection of serving.
            model_name: for messages that refuse a model.
            checkpointing: whether the backward pass computes the attention of decoded tokens again instead of keeping
                it.
        """
        from transformers import AttentionInterface

        self.name = f"vllm_sparse_training_{id(self)}"
        AttentionInterface.register(self.name, self._attend)
        self._served = served
        self._model_name = model_name
        self._checkpointing = checkpointing
        self._now = _Pass(Packing((1,)))
        self._selection_losses: dict[int, torch.Tensor] = {}

    @contextmanager
    def using(
        self,
        packing: Packing,
        mask: PageMask | None,
        prompts: tuple[int, ...] | None = None,
        is_exact: bool = False,
        shares: Shares | None = None,
    ) -> Iterator[None]:
        """Attend within the sequences of a row. Backward passes belong in the block. Arguments: see `_Pass`."""
        before = self._now, self._selection_losses
        self._now, self._selection_losses = _Pass(packing, mask, prompts, is_exact, shares), {}
        try:
            yield
        finally:
            self._now, self._selection_losses = before

    def selection_loss(self, device: torch.device) -> torch.Tensor:
        """Return the sum over tokens of the mean over layers and KV heads, in nats; 0 if no scores learn.

        Call it between a forward pass and its backward pass, which may run the attention again.
        """
        losses = list(self._selection_losses.values())
        return torch.stack(losses).mean() if losses else torch.zeros((), device=device)

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        is_local = kwargs.get("sliding_window") or attends_in_chunks(module)
        if kwargs.get("s_aux") is not None or kwargs.get("softcap") or is_local:
            raise ConfigurationError(
                f"model: got {self._model_name!r} with learned attention sinks, capped logits, sliding windows or "
                "chunks, allowed for training: models without"
            )
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        # There is one row at a time: from [1, heads, tokens, size] to [tokens, heads, size].
        # Under autocast, rotary embedding gives float32 queries and keys, but values are 16-bit. Serving uses 16 bits.
        query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
        is_sparse = module.layer_idx >= self._served.first_dense_layers
        packing, mask, prompts, is_exact, page_shares = self._now
        if mask is None and page_shares is not None and is_sparse:
            page_shares[module.layer_idx] = self._dense_shares(query, key, scale)
        if mask is None or not is_sparse or mask.reads_all(max(packing.lengths)):
            return _attend_densely(query, key, value, packing, scale)[None], None
        layout = self._served.layout(key.shape[2])
        records = page_records(key, packing, mask.page_size, layout.kind, layout.format)
        if prompts is None:
            return masked_attention(query, key, value, records, packing, mask, scale)[None], None
        outputs: list[torch.Tensor] = []
        losses: list[torch.Tensor] = []
        shares = None if page_shares is None else iter(page_shares[module.layer_idx])
        for sequence, prompt, parts in self._decoded(query.shape[1]):
            if prompt:
                inside = slice(sequence.begin, sequence.begin + prompt)
                outputs.append(_attend_densely(query[inside], key[inside], value[inside], Packing((prompt,)), scale))
            for begin, end in parts:
                so_far, first = slice(sequence.begin, end), sequence.first_page
                part = (
                    query[begin:end], key[so_far], value[so_far],
                    records[first : first + (end - sequence.begin) // mask.page_size],
                    None if shares is None else next(shares), mask, scale, is_exact,
                )  # fmt: skip
                if self._checkpointing:
                    attended, loss = checkpoint(_attend_decoded, *part, use_reentrant=False, preserve_rng_state=False)
                else:
                    attended, loss = _attend_decoded(*part)
                outputs.append(attended)
                losses.append(loss)
        if shares is not None and losses:
            # Recomputed activations write the same value again.
            self._selection_losses[module.layer_idx] = torch.stack(losses).sum() / key.shape[1]
        return torch.cat(outputs)[None], None

    def _decoded(self, num_heads: int) -> Iterator[tuple[Sequence, int, list[tuple[int, int]]]]:
        """Yield each sequence, the length of its prompt, and the bounds of the parts of its decoded tokens."""
        page_size = self._served.selection.page_size
        for sequence, prompt in zip(self._now.packing.sequences(page_size), self._now.prompts or (), strict=True):
            end, size = sequence.begin + sequence.length, max(_LOGITS_AT_ONCE // (num_heads * sequence.length), 1)
            begins = range(sequence.begin + prompt, end, size)
            yield sequence, prompt, [(begin, min(begin + size, end)) for begin in begins]

    def _dense_shares(self, query: torch.Tensor, key: torch.Tensor, scale: float) -> list[torch.Tensor]:
        """Return the share of dense attention on each page, for each decoded part."""
        page_size = self._served.selection.page_size
        with torch.autocast(query.device.type, enabled=False):
            return [
                dense_shares(query[begin:end], key[sequence.begin : end], page_size, scale)
                for sequence, _, parts in self._decoded(query.shape[1])
                for begin, end in parts
            ]


def _attend_densely(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scale: float,
    multiple: int | None = None,
) -> torch.Tensor:
    """Return causal attention of each sequence to itself, in the shape of the query.

    Args:
        query: `[tokens, heads, size]`.
        key: `[tokens, KV heads, size]`.
        value: `[tokens, KV heads, size]`.
        packing: the sequences.
        scale: of logits.
        multiple: sequences are padded with zeros to a multiple of this length, shorter ones to a power of two. No token
            reads the padding. None: 1 on a CPU, a suitable value on a GPU.
    """
    multiple = multiple or (_LENGTHS_ON_A_GPU if query.is_cuda else 1)
    parts = zip(*(x.transpose(0, 1)[None].split(packing.lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = []
    for part, length in zip(parts, packing.lengths, strict=True):
        lacking = -length % min(multiple, 1 << (length - 1).bit_length())
        queries, keys, values = (pad(x, (0, 0, 0, lacking)) for x in part) if lacking else part
        attended = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(attended[0, :, :length])
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _attend_decoded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    records: PageRecords,
    shares: torch.Tensor | None,
    mask: PageMask,
    scale: float,
    is_exact: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `newest_attention`, and `selection_loss`, which is 0 without shares.

    With `is_exact`, values are those of the hard mask and gradients those of the given mask.
    """
    # Serving compares scores in float32. Autocast would keep 16 bits.
    with torch.autocast(query.device.type, enabled=False):
        loss = torch.zeros((), device=query.device)
        if shares is not None:
            loss = selection_loss(query, len(key), records, shares, mask, scale)
        attended = newest_attention(query, key, value, records, mask, scale)
        if not is_exact or mask.is_hard:
            return attended, loss
        with torch.no_grad():
            served = newest_attention(query, key, value, records, replace(mask, temperature=None), scale)
        return attended + (served - attended).detach(), loss
