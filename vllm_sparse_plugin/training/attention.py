"""The attention of a model in training: an attention function of transformers, under a page mask or dense."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from sparse_kernels.batch import PageSelection
from sparse_kernels.masked_attention import TRAINABLE, Packing, PageMask, masked_attention, page_records
from sparse_kernels.page_statistics import StatisticsLayout
from torch.nn.functional import scaled_dot_product_attention

from vllm_sparse_plugin.config import KEY, ResolvedConfig
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.policies import UniqueSelection

_CACHE_ITEMSIZE = 2
"""Models are trained for a KV cache of 16 bits."""


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

    @contextmanager
    def using(self, packing: Packing, mask: PageMask | None) -> Iterator[None]:
        """Attend within the sequences of a row, under a mask or, without one, densely; backward passes belong in it."""
        before = self._packing, self._mask
        self._packing, self._mask = packing, mask
        try:
            yield
        finally:
            self._packing, self._mask = before

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
        return masked_attention(query, key, value, records, self._packing, self._mask, scale)[None], None


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
