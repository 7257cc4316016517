"""One attention layer on a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sparse_kernels.batch import Prompts, QueryTokens
from sparse_kernels.cache import KVCache
from sparse_kernels.group_routing import route_groups
from sparse_kernels.page_statistics import update_page_statistics
from sparse_kernels.rolling_attention import attend_rolling
from sparse_kernels.sparse_attention import attend_pages
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_plugin.attention import packing
from vllm_sparse_plugin.attention.base import SparseImpl
from vllm_sparse_plugin.attention.cpu.metadata import DecodeTokens, SparseCPUMetadata
from vllm_sparse_plugin.attention.prefill import PromptKernels, PromptRound, attend_prompts
from vllm_sparse_plugin.attention.stopping import select_until_stable
from vllm_sparse_plugin.policies.dense import every_page


class SparseCPUImpl(SparseImpl, CPUAttentionBackendImpl):
    """One attention layer."""

    isa: str
    """Instruction set of vLLM's attention kernel. It decides how blocks are packed."""

    def warm_up(self, spec: AttentionSpec) -> None:
        """Compiles the kernels of this layer on a temporary cache, before the first request."""
        self.bind_cache(torch.zeros(2, self.num_kv_heads, spec.num_states, 2 * self.head_size, dtype=spec.dtype))
        first = torch.zeros(1, dtype=torch.int64)
        self._update_statistics((first, first))
        if self.plan.is_sparse:
            grouped = torch.zeros(1, self.num_kv_heads, self.num_queries_per_kv, self.head_size, dtype=spec.dtype)
            # A page may be as large as a block; then the incomplete page is in the second block.
            token = QueryTokens(grouped, torch.arange(2).unsqueeze(0), first + self.plan.page_size + 1)
            attend_pages(token, self.cache, self._choose(token, self.cache, self.all_heads, None), self.softmax)
            if self.plan.routing is not None:
                route_groups(token, self.cache.keys, self.plan.routing)
        if self.plan.counters is not None:
            # This token is not of a request.
            self.plan.counters.zero_()
        self.bound_cache = None

    def _make_views(self, kv_cache: torch.Tensor) -> None:
        self.token_rows = kv_cache[:, :, : self.plan.block_size]
        if not self.plan.needs_cache_views:
            return
        self.all_heads = torch.arange(self.num_kv_heads)[None]

        def in_pages(page_size: int) -> KVCache:
            return KVCache(*packing.paged_keys_and_values(self.token_rows, self.isa, page_size))

        self._make_caches(kv_cache, in_pages)
        if self.plan.routing is not None:
            self.cache_by_head = self.cache.by_head

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
        """Routes, selects and attends in the layer `name`; takes and returns `[num_tokens, num_heads, head_size]`."""
        grouped = query.unflatten(1, (self.num_kv_heads, self.num_queries_per_kv))
        tokens = QueryTokens(grouped, decode.block_table, decode.context_lens)
        routing = self.plan.routing
        skipped = None if routing is None else route_groups(tokens, self.cache.keys, routing)
        given = None
        if self.plan.anchor is not None or decode.chosen_before is not None:
            given = decode.pages_of(self.plan.anchor or name, self.plan.page_size)
            given = given if self.plan.anchor_heads is None else given[:, self.plan.anchor_heads]
        if routing is None or skipped is None:
            pages = self._choose(tokens, self.cache, self.all_heads, decode.budgets) if given is None else given
            if self.plan.is_anchor or decode.keeps_pages:
                decode.chosen[name] = pages
            return attend_pages(tokens, self.cache, pages, self.softmax)
        if routing.counts is not None:
            counts = torch.full((self.num_kv_heads,), len(query))
            routing.counts.add_(torch.stack([skipped.sum(dim=0), counts], dim=1))
        # Each remaining KV group becomes a token of its own, over a cache of one KV head.
        token, head = (~skipped).nonzero(as_tuple=True)
        blocks = tokens.block_table[token] * self.num_kv_heads + head[:, None]
        active = QueryTokens(grouped[token, head].unsqueeze(1), blocks, tokens.context_lens[token])
        output = torch.zeros_like(grouped)
        budgets = None if decode.budgets is None else decode.budgets[token]
        pages = self._choose(active, self.cache_by_head, head[:, None], budgets)
        output[token, head] = attend_pages(active, self.cache_by_head, pages, self.softmax)
        return output.flatten(1, 2)

    def _choose(
        self, tokens: QueryTokens, cache: KVCache, heads: torch.Tensor, budgets: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the pages to read, and counts them.

        Args:
            tokens: the query tokens.
            cache: the cache.
            heads: `[num_tokens or 1, num_kv_heads]` int64, the layer's KV head of each KV head of the cache.
            budgets: see `DecodeTokens`.
        """
        pages, reads = self._pages(tokens, cache, budgets)
        if reads is not None and self.plan.counters is not None:
            self.plan.counters.index_add_(0, heads.expand(reads.shape[:2]).flatten(), reads.flatten(0, 1))
        return pages

    def _pages(
        self, tokens: QueryTokens, cache: KVCache, budgets: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the pages to read, and the counts of `count_reads`; None for the counts if lengths give them."""
        plan, num_pages = self.plan, tokens.num_pages(cache.page_size)
        if plan.selector is None:
            return every_page(num_pages, cache.num_kv_heads), None
        if plan.stop_rule is None:
            pages = plan.selector.select(tokens.query, cache.statistics, tokens.block_table, num_pages, budgets)
            if plan.selects_in_torch:
                # The kernel does not check pages. Beyond the context are blocks of others.
                pages = pages.where(pages < num_pages[:, None, None], -1)
            return pages, None
        return select_until_stable(plan.selector, plan.stop_rule, tokens, cache, self.softmax)
