"""One attention layer on a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from sparse_kernels.batch import DecodeBatch, DecodeOutput, Prompts
from sparse_kernels.cache import KVCache
from sparse_kernels.page_statistics import update_page_statistics
from sparse_kernels.rolling_attention import attend_rolling
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_plugin.attention import packing
from vllm_sparse_plugin.attention.base import SparseImpl
from vllm_sparse_plugin.attention.cpu.metadata import DecodeTokens, SparseCPUMetadata
from vllm_sparse_plugin.attention.plan import LayerPlan
from vllm_sparse_plugin.attention.prefill import PromptKernels, PromptRound, attend_prompts


class SparseCPUImpl(SparseImpl, CPUAttentionBackendImpl):
    """One attention layer."""

    isa: str
    """Instruction set of vLLM's attention kernel. It decides how blocks are packed."""

    def bind(self, plan: LayerPlan, isa: str | None = None) -> None:
        """Also sets the instruction set; None for no change."""
        super().bind(plan)
        self.isa = isa or self.isa

    def warm_up(self, spec: AttentionSpec) -> None:
        """Compiles the kernels of this layer on a temporary cache, before the first request."""
        self.bind_cache(torch.zeros(2, self.num_kv_heads, spec.num_states, 2 * self.head_size, dtype=spec.dtype))
        first = torch.zeros(1, dtype=torch.int64)
        self._update_statistics((first, first))
        if self.plan.is_sparse:
            # Enough pages to choose from, in one block: a page may be as large as a block.
            pages = 2 if self.plan.page_selection is None else self.plan.page_selection.least + 1
            query = torch.zeros(1, self.num_heads, self.head_size, dtype=spec.dtype)
            table = torch.zeros(1, pages + 1, dtype=torch.int32)
            budget = None if self.plan.page_selection is None else torch.tensor([pages - 1], dtype=torch.int32)
            batch = DecodeBatch(query, table, first.int() + pages * self.plan.page_size + 1, budgets=budget)
            self.attend_decoding(batch, self.cache, DecodeOutput.like(query), False)
        # This token is not of a request.
        for counts in (self.plan.counters, None if self.plan.routing is None else self.plan.routing.counts):
            if counts is not None:
                counts.zero_()
        self.bound_cache = None

    def _make_views(self, kv_cache: torch.Tensor) -> None:
        self.token_rows = kv_cache[:, :, : self.plan.block_size]
        if not self.plan.needs_cache_views:
            return

        def in_pages(page_size: int) -> KVCache:
            return KVCache(*packing.paged_keys_and_values(self.token_rows, self.isa, page_size))

        self._make_caches(kv_cache, in_pages)

    def _update_statistics(self, filled: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Writes the statistics of pages, given by blocks and by indices within the blocks."""
        cache = self.statistics_cache if self.plan.statistics is not None else None
        if cache is not None:
            assert cache.statistics is not None
            update_page_statistics(cache.keys, cache.statistics, *filled)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache[:, :, : self.plan.block_size], slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        assert isinstance(attn_metadata, SparseCPUMetadata)
        scales = output_scale, output_block_scale
        attend = partial(self._attend_all, layer, query, key, value, attn_metadata, output, scales)
        self.run_step(layer, query, kv_cache, attn_metadata.observed, attend)
        return output

    def _attend_all(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        attn_metadata: SparseCPUMetadata,
        output: torch.Tensor,
        output_scales: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        """Attends with all tokens of a step; for the arguments see `forward`."""

        def dense(query: torch.Tensor, metadata: CPUAttentionMetadata, output: torch.Tensor) -> torch.Tensor:
            return super(SparseCPUImpl, self).forward(
                layer, query, key, value, self.token_rows, metadata, output, *output_scales
            )

        # A layer that shares the cache of another layer finds the statistics there.
        if attn_metadata.filled and self.kv_sharing_target_layer_name is None:
            self._update_statistics(attn_metadata.filled)
        if attn_metadata.rolling is not None:
            rolling = attn_metadata.rolling
            if (remaining := rolling.rest) is not None:
                output[remaining.tokens] = dense(
                    query[remaining.tokens], remaining.metadata, torch.empty_like(query[remaining.tokens])
                )
            output[rolling.tokens] = self._attend_rolling(query[rolling.tokens], rolling.prompts)
            return
        decode = attn_metadata.decode if self.plan.is_sparse else None
        prompts = attn_metadata.prompts if self.plan.prefill is not None else None
        if decode is None and prompts is None:
            dense(query, attn_metadata, output)
            return
        rest = attn_metadata.rest[self.plan.is_sparse, self.plan.prefill is not None]
        if rest is not None:
            output[rest.tokens] = dense(query[rest.tokens], rest.metadata, torch.empty_like(output[rest.tokens]))
        if decode is not None:
            output[decode.tokens] = self._decode(layer.layer_name, query[decode.tokens], decode)
        if prompts is not None:
            output[prompts.tokens] = self._prefill(query[prompts.tokens], prompts.part)

    def _prefill(self, query: torch.Tensor, part: PromptRound) -> torch.Tensor:
        """Attends with prompts; takes and returns `[num_tokens, num_heads, head_size]`."""
        assert self.plan.prefill is not None
        output = torch.empty_like(query)
        batch = part.prompts.batch(query)
        attend_prompts(
            self.plan.prefill, part, batch, self.prompt_cache, self.softmax, output, PromptKernels()
        )  # fmt: skip
        return output

    def _attend_rolling(self, query: torch.Tensor, prompts: Prompts) -> torch.Tensor:
        """Attends with rolling positions; takes and returns `[num_tokens, num_heads, head_size]`."""
        assert self.plan.rolling is not None
        window, rotation = self.plan.rolling
        return attend_rolling(prompts.batch(query), self.cache, self.softmax, window, rotation, torch.empty_like(query))

    def _decode(self, name: str, query: torch.Tensor, decode: DecodeTokens) -> torch.Tensor:
        """Attends with decoding tokens in the layer `name`; takes and returns `[num_tokens, num_heads, head_size]`."""
        batch = DecodeBatch(
            query, decode.block_table, decode.context_lens, dense_tokens=self.plan.dense_tokens, budgets=decode.budgets
        )
        chooses = self.plan.anchor is None and decode.chosen_before is None
        if not chooses:
            given = decode.pages_of(self.plan.anchor or name, self.plan.page_size)
            given = given if self.plan.anchor_heads is None else given[:, self.plan.anchor_heads]
            batch = replace(batch, pages=given)
        output = replace(DecodeOutput.like(query), counters=self.plan.counters)
        keeps = chooses and (self.plan.is_anchor or decode.keeps_pages)
        pages = self.attend_decoding(batch, self.cache, output, keeps)
        if pages is not None:
            decode.chosen[name] = pages
        return output.heads
