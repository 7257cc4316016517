"""The attention of a model in training: an attention function of transformers, under a page mask or dense."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from sparse_kernels.batch import PageSelection
from sparse_kernels.masked_attention import (
    TRAINABLE,
    Packing,
    PageMask,
    PageRecords,
    masked_attention,
    newest_attention,
    page_records,
)
from sparse_kernels.page_statistics import StatisticsLayout
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from vllm_sparse_plugin.config import KEY, ResolvedConfig
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.policies import UniqueSelection

_CACHE_ITEMSIZE = 2
"""Models are trained for a KV cache of 16 bits."""
_LOGITS_AT_ONCE = 1 << 27
"""Of the tokens after a prompt, of all heads: 512 MB in float32, of which a pass needs a few times as much."""


@dataclass(frozen=True)
class ServedSelection:
    """What serving reads, as the layers of a model in training need it."""

    selection: UniqueSelection
    first_dense_layers: int
    min_context_tokens: int

    @classmethod
    def of(cls, config: ResolvedConfig) -> ServedSelection:
        """Returns the selection of a configuration.

        Raises:
            ConfigurationError: if models cannot be trained with it.
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
        """Returns the kind and the format of the page statistics."""
        return self.selection.statistics_layout(head_size, _CACHE_ITEMSIZE)

    def mask(self, temperature: float | None, budget_tokens: int | None = None) -> PageMask:
        """Returns the mask of a step.

        Args:
            temperature: T, None for the hard mask.
            budget_tokens: in place of what is served.
        """
        served: PageSelection = self.selection.page_selection()
        if budget_tokens is not None:
            served = replace(served, k=budget_tokens // self.selection.page_size)
        return PageMask(served, self.selection.page_size, temperature, max(self.min_context_tokens - 1, 0))


class PackedAttention:
    """What the layers of a model attend with, while a packing is set."""

    def __init__(self, served: ServedSelection, model_name: str) -> None:
        """Register the function with transformers under a name of its own.

        Args:
            served: what serving reads.
            model_name: for the sentence that refuses a model.
        """
        from transformers import AttentionInterface

        self.name = f"vllm_sparse_training_{id(self)}"
        AttentionInterface.register(self.name, self._attend)
        self._served = served
        self._model_name = model_name
        self._packing = Packing((1,))
        self._mask: PageMask | None = None
        self._prompts: tuple[int, ...] | None = None
        self._is_exact = False

    @contextmanager
    def using(
        self,
        packing: Packing,
        mask: PageMask | None,
        prompts: tuple[int, ...] | None = None,
        is_exact: bool = False,
    ) -> Iterator[None]:
        """Attend within the sequences of a row; backward passes belong in it.

        Args:
            packing: the sequences.
            mask: None for dense attention.
            prompts: first tokens of each sequence that attend densely whatever the mask, as a prompt is prefilled.
            is_exact: whether what comes after prompts attends under the hard mask, and only its gradients are those
                of the soft one.
        """
        before = self._packing, self._mask, self._prompts, self._is_exact
        self._packing, self._mask, self._prompts, self._is_exact = packing, mask, prompts, is_exact
        try:
            yield
        finally:
            self._packing, self._mask, self._prompts, self._is_exact = before

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if kwargs.get("s_aux") is not None or kwargs.get("softcap") or kwargs.get("sliding_window"):
            raise ConfigurationError(
                f"model: got {self._model_name!r} with learned attention sinks, capped logits or sliding windows, "
                "allowed for training: models without"
            )
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        # Rows come one at a time: from [1, heads, tokens, size] to [tokens, heads, size].
        # Under autocast positions leave queries and keys in float32 beside values of 16 bits, as which all are served.
        query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
        if (
            self._mask is None
            or module.layer_idx < self._served.first_dense_layers
            or self._mask.reads_all(max(self._packing.lengths))
        ):
            return _attend_densely(query, key, value, self._packing, scale)[None], None
        layout = self._served.layout(key.shape[2])
        records = page_records(key, self._packing, self._mask.page_size, layout.kind, layout.format)
        if self._prompts is None:
            return masked_attention(query, key, value, records, self._packing, self._mask, scale)[None], None
        outputs: list[torch.Tensor] = []
        sequences = self._packing.sequences(self._mask.page_size)
        for (begin, length, first_page, num_pages), prompt in zip(sequences, self._prompts, strict=True):
            tokens, pages = slice(begin, begin + length), slice(first_page, first_page + num_pages)
            outputs += self._attend_after(prompt, query[tokens], key[tokens], value[tokens], records[pages], scale)
        return torch.cat(outputs)[None], None

    def _attend_after(
        self,
        prompt: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        records: PageRecords,
        scale: float,
    ) -> Iterator[torch.Tensor]:
        """Yields the attention of a sequence in parts: densely that of its prompt, then that of what is decoded."""
        assert self._mask is not None
        length, num_heads, _ = query.shape
        if prompt:
            yield _attend_densely(query[:prompt], key[:prompt], value[:prompt], Packing((prompt,)), scale)
        size = max(_LOGITS_AT_ONCE // (num_heads * length), 1)
        for begin in range(prompt, length, size):
            end = min(begin + size, length)
            pages = end // self._mask.page_size
            yield checkpoint(
                _attend_decoded, query[begin:end], key[:end], value[:end], records[:pages],
                self._mask, scale, self._is_exact, use_reentrant=False,
            )  # fmt: skip


def _attend_densely(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float
) -> torch.Tensor:
    """Returns causal attention of each sequence to itself, of the shape of the query."""
    parts = zip(*(x.transpose(0, 1)[None].split(packing.lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = [
        scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)[0]
        for queries, keys, values in parts
    ]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def _attend_decoded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    records: PageRecords,
    mask: PageMask,
    scale: float,
    is_exact: bool,
) -> torch.Tensor:
    """See `newest_attention`; exact, the values are those of the hard mask and the gradients those of the given one."""
    # Scores are compared as serving computes them, of which autocast would keep 16 bits.
    with torch.autocast(query.device.type, enabled=False):
        attended = newest_attention(query, key, value, records, mask, scale)
        if not is_exact or mask.is_hard:
            return attended
        with torch.no_grad():
            served = newest_attention(query, key, value, records, replace(mask, temperature=None), scale)
        return attended + (served - attended).detach()
