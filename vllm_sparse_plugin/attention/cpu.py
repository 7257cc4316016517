"""Runs the sparse decode pipeline inside vLLM's CPU build.

Prefill, short contexts, sliding-window layers and leading dense layers run vLLM's own CPU attention on the token
rows of the cache; decoding tokens of long contexts run route, select and attend. Which requests are which is decided
once per step by the metadata builder, from lengths alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sparse_kernels.batch import QueryTokens
from sparse_kernels.cache import KVCache
from sparse_kernels.group_routing import route_groups
from sparse_kernels.page_statistics import update_page_statistics
from sparse_kernels.sparse_attention import attend_pages
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_plugin.attention import packing
from vllm_sparse_plugin.attention.base import SparseBackend, SparseImpl, report_memory
from vllm_sparse_plugin.attention.plan import plan_layers
from vllm_sparse_plugin.attention.stopping import select_until_stable
from vllm_sparse_plugin.diagnostics.live import StepSampler
from vllm_sparse_plugin.policies.dense import EveryPage, every_page

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType


class SparseCPUBackend(SparseBackend, CPUAttentionBackend):
    """Sparse decode attention on vLLM's CPU build; a subclass per registered name."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "bfloat16"]

    @staticmethod
    def get_impl_cls() -> type[SparseCPUImpl]:
        return SparseCPUImpl

    @staticmethod
    def get_builder_cls() -> type[SparseCPUMetadataBuilder]:
        return SparseCPUMetadataBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        return True


@dataclass
class DecodeTokens:
    """The query tokens of a step that attend sparsely."""

    tokens: torch.Tensor
    """`[num_tokens]` int64, positions in the batch."""
    block_table: torch.Tensor
    """`[num_tokens, max_blocks]` int64."""
    context_lens: torch.Tensor
    """`[num_tokens]` int64, tokens that each may attend, itself included."""
    sampled: int | None = None
    """Index of the token whose selection is measured, if one's is."""


@dataclass
class SparseCPUMetadata(CPUAttentionMetadata):
    """vLLM's CPU metadata for the whole batch, and what sparse layers do instead."""

    filled: tuple[torch.Tensor, torch.Tensor] | None = None
    """`[num_filled]` int64 each, blocks and indices within them of the pages that this step completes, if any."""
    decode: DecodeTokens | None = None
    """Tokens that attend sparsely; None if there are none."""
    dense_tokens: torch.Tensor | None = None
    """`[num_dense]` int64, positions of the other tokens, if both kinds are present."""
    dense: CPUAttentionMetadata | None = None
    """Metadata of the batch that those other tokens form."""


class SparseCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Splits each step into tokens that attend sparsely and tokens that attend densely."""

    isa: str

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        backend: type[SparseCPUBackend] = next(iter(layers.values())).attn_backend
        self.sparse = backend.config()
        self.page_size = (self.sparse.selector or EveryPage()).page_size
        self.isa = packing.supported_isa(self.isa)
        self._set_isa_to_layers(layer_names)
        if self.sparse.is_sparse:
            packing.check_packing(self.isa, self.block_size, self.head_dim, self.page_size, self.dtype)
        statistics = backend.statistics_layout(kv_cache_spec)
        self.sampler = StepSampler(self.sparse.config.diagnostics.sample_every)
        group = plan_layers(layers, self.sparse, vllm_config, self.block_size, statistics, device)
        self.counts = group.counts
        self.reads = group.reads
        self.routes = any(plan.routing is not None for plan in group.plans.values())
        for name, layer in layers.items():
            layer.impl.isa = self.isa
            layer.impl.bind(group.plans[name])
        sparse_impls = [layer.impl for layer in layers.values() if layer.impl.plan.is_sparse]
        for impl in {impl.num_heads: impl for impl in sparse_impls}.values():
            impl.warm_up(self.kv_cache_spec)
        if statistics is not None:
            report_memory(backend.get_name(), vllm_config, self.kv_cache_spec, statistics, len(layers))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseCPUMetadata:
        common = common_attn_metadata
        whole = super().build(common_prefix_len, common, fast_build)
        metadata = SparseCPUMetadata(**{field.name: getattr(whole, field.name) for field in fields(whole)})

        if not self.sparse.is_sparse:
            return metadata
        for counts in self.counts:
            counts.step()
        if self.reads is not None:
            self.reads.step(common, self.reorder_batch_threshold)

        page_size = self.page_size
        slots = common.slot_mapping[: common.num_actual_tokens]
        filled = slots[(slots >= 0) & (slots % page_size == page_size - 1)]
        if len(filled):
            metadata.filled = filled // self.block_size, filled % self.block_size // page_size

        query_lens = common.query_start_loc[1:] - common.query_start_loc[:-1]
        sparse_requests = self._sparse_requests(common, query_lens)
        if not sparse_requests.any():
            return metadata
        request_of_token = torch.repeat_interleave(query_lens)
        is_sparse = sparse_requests[request_of_token]
        tokens = is_sparse.nonzero().squeeze(1)
        requests = request_of_token[tokens]
        from_end = common.query_start_loc[1:][requests] - 1 - tokens
        context_lens = (common.seq_lens[requests] - from_end).long()
        metadata.decode = DecodeTokens(
            tokens,
            common.block_table_tensor[requests].long(),
            context_lens,
            self.sampler.pick(len(tokens)),
        )
        if len(tokens) < common.num_actual_tokens:
            metadata.dense_tokens = (~is_sparse).nonzero().squeeze(1)
            metadata.dense = super().build(
                common_prefix_len, _subset(common, ~sparse_requests, query_lens, metadata.dense_tokens), fast_build
            )
        return metadata

    def _sparse_requests(self, common: CommonAttentionMetadata, query_lens: torch.Tensor) -> torch.Tensor:
        """Finds decoding requests that are routed, or whose context exceeds the budget: `[num_reqs]` bool."""
        assert self.reorder_batch_threshold is not None
        sparse = (query_lens > 0) & (query_lens <= self.reorder_batch_threshold)
        if not self.routes and self.sparse.selector is not None:
            sparse &= common.seq_lens // self.page_size > self.sparse.selector.budget_pages
        sparse &= common.seq_lens >= self.sparse.config.min_context_tokens
        if common.is_prefilling is not None:
            sparse &= ~common.is_prefilling
        return sparse


def _subset(
    common: CommonAttentionMetadata, requests: torch.Tensor, query_lens: torch.Tensor, tokens: torch.Tensor
) -> CommonAttentionMetadata:
    """Returns the batch that some of the requests form, with all of their tokens."""
    lens = query_lens[requests]
    start = torch.zeros(len(lens) + 1, dtype=common.query_start_loc.dtype)
    torch.cumsum(lens, 0, out=start[1:])
    seq_lens = common.seq_lens[requests]
    return common.replace(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=seq_lens,
        num_reqs=len(lens),
        num_actual_tokens=len(tokens),
        max_query_len=int(lens.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=common.block_table_tensor[requests],
        slot_mapping=common.slot_mapping[tokens],
    )


class SparseCPUImpl(SparseImpl, CPUAttentionBackendImpl):
    """One attention layer."""

    isa: str
    """Instruction set of vLLM's attention kernel, which decides how blocks are packed."""

    def warm_up(self, spec: AttentionSpec) -> None:
        """Compiles what this layer needs, on a cache of its own, so that no request waits for it."""
        self.bind_cache(torch.zeros(2, self.num_kv_heads, spec.num_states, 2 * self.head_size, dtype=spec.dtype))
        first = torch.zeros(1, dtype=torch.int64)
        if self.cache.statistics is not None:
            update_page_statistics(self.cache.keys, self.cache.statistics, first, first)
        grouped = torch.zeros(1, self.num_kv_heads, self.num_queries_per_kv, self.head_size, dtype=spec.dtype)
        token = QueryTokens(grouped, first.unsqueeze(1), first + self.plan.page_size + 1)
        self._attend(token, self.cache, self.all_heads)
        if self.plan.routing is not None:
            route_groups(token, self.cache.keys, self.plan.routing)
        if self.plan.counters is not None:
            # Nobody asked for this token.
            self.plan.counters.zero_()
        self._bound_cache = None

    def _make_views(self, kv_cache: torch.Tensor) -> None:
        self.token_rows = kv_cache[:, :, : self.plan.block_size]
        if not self.plan.is_sparse and self.plan.statistics is None:
            return
        self.all_heads = torch.arange(self.num_kv_heads)[None]
        keys, values = packing.paged_keys_and_values(self.token_rows, self.isa, self.plan.page_size)
        self.cache = KVCache(keys, values, self._statistics(kv_cache))
        if self.plan.routing is not None:
            self.cache_by_head = self.cache.by_head

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
        self.bind_cache(kv_cache)

        def dense(query: torch.Tensor, metadata: CPUAttentionMetadata, output: torch.Tensor) -> torch.Tensor:
            return super(SparseCPUImpl, self).forward(
                layer, query, key, value, self.token_rows, metadata, output, output_scale, output_block_scale
            )

        # A layer that shares the cache of another finds the statistics there.
        if attn_metadata.filled and self.plan.statistics is not None and self.kv_sharing_target_layer_name is None:
            assert self.cache.statistics is not None
            update_page_statistics(self.cache.keys, self.cache.statistics, *attn_metadata.filled)
        decode = attn_metadata.decode
        if decode is None or not self.plan.is_sparse:
            return dense(query, attn_metadata, output)
        if attn_metadata.dense is None:
            output[: attn_metadata.num_actual_tokens] = self._decode(query[: attn_metadata.num_actual_tokens], decode)
            return output
        dense_tokens = attn_metadata.dense_tokens
        output[dense_tokens] = dense(query[dense_tokens], attn_metadata.dense, torch.empty_like(output[dense_tokens]))
        output[decode.tokens] = self._decode(query[decode.tokens], decode)
        return output

    def _decode(self, query: torch.Tensor, decode: DecodeTokens) -> torch.Tensor:
        """Routes, selects and attends; takes and returns `[num_tokens, num_heads, head_size]`."""
        grouped = query.unflatten(1, (self.num_kv_heads, self.num_queries_per_kv))
        tokens = QueryTokens(grouped, decode.block_table, decode.context_lens)
        if decode.sampled is not None:
            self._measure(tokens[decode.sampled : decode.sampled + 1])
        routing = self.plan.routing
        if routing is None:
            return self._attend(tokens, self.cache, self.all_heads)
        skipped = route_groups(tokens, self.cache.keys, routing)
        if routing.counts is not None:
            asked = torch.full((self.num_kv_heads,), len(query))
            routing.counts.add_(torch.stack([skipped.sum(dim=0), asked], dim=1))
        # The groups that are left form a batch of their own, each a token of a cache of one KV head.
        token, head = (~skipped).nonzero(as_tuple=True)
        blocks = tokens.block_table[token] * self.num_kv_heads + head[:, None]
        active = QueryTokens(grouped[token, head].unsqueeze(1), blocks, tokens.context_lens[token])
        output = torch.zeros_like(grouped)
        output[token, head] = self._attend(active, self.cache_by_head, head[:, None])
        return output.flatten(1, 2)

    def _attend(self, tokens: QueryTokens, cache: KVCache, heads: torch.Tensor) -> torch.Tensor:
        """Attends with tokens to the pages that the layer reads.

        Args:
            tokens: the query tokens.
            cache: what they attend to.
            heads: `[num_tokens or 1, num_kv_heads]` int64, which KV heads of the layer those of the cache are.
        """
        pages, reads = self._pages(tokens, cache)
        if reads is not None and self.plan.counters is not None:
            self.plan.counters.index_add_(0, heads.expand(reads.shape[:2]).flatten(), reads.flatten(0, 1))
        return attend_pages(tokens, cache, pages, self.softmax)

    def _pages(self, tokens: QueryTokens, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the pages that the layer reads and, where attention may stop, what `count_reads` says of them."""
        plan, num_pages = self.plan, tokens.num_pages(cache.page_size)
        if plan.selector is None:
            return every_page(num_pages, cache.num_kv_heads), None
        if plan.stop_rule is None:
            return plan.selector.select(tokens.query, cache.statistics, tokens.block_table, num_pages), None
        return select_until_stable(plan.selector, plan.stop_rule, tokens, cache, self.softmax)

    def _measure(self, token: QueryTokens) -> None:
        """Records the quality of one token's selection, of all its groups."""
        if self.plan.quality is not None and self.plan.selector is not None:
            pages, _ = self._pages(token, self.cache)
            self.plan.quality.record(token, self.cache, pages, self.softmax)
