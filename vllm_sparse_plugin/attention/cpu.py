"""The sparse decode pipeline inside vLLM's CPU build.

Prefill, short contexts, sliding-window layers and leading dense layers run vLLM's own CPU attention on the token
rows of the cache; decoding tokens of long contexts run route, select and attend. Which requests are which is decided
once per step by the metadata builder, from lengths alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from sparse_kernels.group_routing import GroupRouting, route_groups
from sparse_kernels.page_statistics import PageStatistics, StatisticsLayout, update_page_statistics
from sparse_kernels.paging import PagedTensor
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
from vllm_sparse_plugin.attention.base import (
    RoutedLayers,
    SparseBackend,
    context_reads_of,
    count_visits_of,
    layer_quality,
    report_memory,
    selects_pages,
)
from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.diagnostics.live import LayerQuality, StepSampler
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.policies.dense import EveryPage, every_page
from vllm_sparse_plugin.termination import select_until_stable

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
    num_pages: torch.Tensor
    """`[num_tokens]` int64, complete pages among them."""
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
        self.page_size = (self.sparse.pages or EveryPage()).page_size
        self.isa = packing.supported_isa(self.isa)
        self._set_isa_to_layers(layer_names)
        if self.sparse.is_sparse:
            packing.check_packing(self.isa, self.block_size, self.head_dim, self.page_size, self.dtype)
        statistics = backend.statistics_layout(kv_cache_spec)
        self.sampler = StepSampler(self.sparse.config.diagnostics.sample_every)
        routed = RoutedLayers(layers, self.sparse, vllm_config, device)
        self.routes = bool(routed.of_layer)
        for name, layer in layers.items():
            layer.impl.configure(self.sparse, self.isa, self.block_size, self.page_size, statistics)
            layer.impl.selects = selects_pages(layer, self.sparse)
            layer.impl.routing = routed.of_layer.get(name)
            if self.sampler.every:
                layer.impl.quality = layer_quality(layer, vllm_config)
        for impl in {layer.impl.num_heads: layer.impl for layer in layers.values() if layer.impl.is_sparse}.values():
            impl.warm_up(self.kv_cache_spec)
        visits = count_visits_of(layers, self.sparse, vllm_config, device)
        self.counts = [counts for counts in (routed.counts, visits) if counts is not None]
        self.reads = context_reads_of(layers, self.sparse, self.reorder_batch_threshold)
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
            self.reads.step(common.seq_lens_cpu_upper_bound, common.query_start_loc_cpu, common.is_prefilling)

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
            context_lens // page_size,
            self.sampler.pick(len(tokens)),
        )
        if len(tokens) < common.num_actual_tokens:
            metadata.dense_tokens = (~is_sparse).nonzero().squeeze(1)
            metadata.dense = super().build(
                common_prefix_len, _subset(common, ~sparse_requests, query_lens, metadata.dense_tokens), fast_build
            )
        return metadata

    def _sparse_requests(self, common: CommonAttentionMetadata, query_lens: torch.Tensor) -> torch.Tensor:
        """`[num_reqs]` bool: decoding requests that are routed, or whose context exceeds the budget."""
        assert self.reorder_batch_threshold is not None
        sparse = (query_lens > 0) & (query_lens <= self.reorder_batch_threshold)
        if not self.routes and self.sparse.pages is not None:
            sparse &= common.seq_lens // self.page_size > self.sparse.pages.budget_pages
        sparse &= common.seq_lens >= self.sparse.config.min_context_tokens
        if common.is_prefilling is not None:
            sparse &= ~common.is_prefilling
        return sparse


def _subset(
    common: CommonAttentionMetadata, requests: torch.Tensor, query_lens: torch.Tensor, tokens: torch.Tensor
) -> CommonAttentionMetadata:
    """The batch that some of the requests form, all tokens of theirs included."""
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


def _by_head(statistics: PageStatistics) -> PageStatistics:
    """The same statistics with every block of every KV head numbered on its own, like `PagedTensor.by_head`."""
    vectors, scales, spread = (
        None if part is None else part.view(-1, 1, *part.shape[2:])
        for part in (statistics.vectors, statistics.scales, statistics.spread)
    )
    assert vectors is not None
    return replace(statistics, vectors=vectors, scales=scales, spread=spread)


class _Rows(NamedTuple):
    """What a batch of tokens attends to."""

    keys: PagedTensor
    values: PagedTensor
    statistics: PageStatistics | None
    block_table: torch.Tensor
    context_lens: torch.Tensor
    num_pages: torch.Tensor
    heads: torch.Tensor
    """`[num_tokens or 1, num_kv_heads]` int64, which KV heads of the layer these are."""

    def at(self, token: slice) -> _Rows:
        """Those of some of the tokens, each with every KV head."""
        return self._replace(
            block_table=self.block_table[token], context_lens=self.context_lens[token], num_pages=self.num_pages[token]
        )


class SparseCPUImpl(CPUAttentionBackendImpl):
    """One attention layer."""

    selects: bool = False
    """Whether decoding tokens of this layer read selected pages."""
    routing: GroupRouting | None = None
    """Which KV groups they skip, if any."""
    quality: LayerQuality | None = None
    """Measures sampled tokens, if any are to be."""
    counters: torch.Tensor | None = None
    """`[num_kv_heads, 4]` int64, see `count_visits`; only where attention may stop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        SparseBackend.remember_settings()
        if self.alibi_slopes is not None:
            raise ConfigurationError("model: got ALiBi position biases, allowed: models with rotary positions")

    @property
    def is_sparse(self) -> bool:
        """Whether decoding tokens of this layer attend in our kernels."""
        return self.selects or self.routing is not None

    def configure(
        self,
        sparse: ResolvedConfig,
        isa: str,
        block_size: int,
        page_size: int,
        statistics: StatisticsLayout | None,
    ) -> None:
        """What the metadata builder knows of the cache, for the layer's own use."""
        self.selection = sparse.pages
        self.stop_rule = sparse.stop_rule
        self.isa = isa
        self.page_size = page_size
        self.block_size = block_size
        self.statistics_layout = statistics
        self.pages_of: torch.Tensor | None = None

    def warm_up(self, spec: AttentionSpec) -> None:
        """Compiles what this layer needs, on a cache of its own, so that no request waits for it."""
        self._bind(torch.zeros(2, self.num_kv_heads, spec.num_states, 2 * self.head_size, dtype=spec.dtype))
        first = torch.zeros(1, dtype=torch.int64)
        lens = first + self.page_size + 1
        if self.statistics is not None:
            update_page_statistics(self.keys, self.statistics, first, first)
        grouped = torch.zeros(1, self.num_kv_heads, self.num_queries_per_kv, self.head_size, dtype=spec.dtype)
        rows = self._rows(first.unsqueeze(1), lens, lens // self.page_size)
        self._attend(grouped, rows)
        if self.routing is not None:
            route_groups(grouped, self.keys, rows.block_table, lens, self.routing)
        self.pages_of = None

    def _bind(self, kv_cache: torch.Tensor) -> None:
        """Views of the layer's cache, made once: they cost as much as a kernel."""
        self.pages_of = kv_cache
        self.token_rows = kv_cache[:, :, : self.block_size]
        self.statistics = None
        if not self.is_sparse:
            return
        self.all_heads = torch.arange(self.num_kv_heads)[None]
        self.keys, self.values = packing.paged_keys_and_values(self.token_rows, self.isa, self.page_size)
        if self.selects and self.statistics_layout is not None:
            rows = kv_cache[:, :, self.block_size :]
            self.statistics = self.statistics_layout.views(rows, self.block_size)
        if self.routing is not None:
            self.statistics_by_head = self.statistics and _by_head(self.statistics)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache[:, :, : self.block_size], slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        assert isinstance(attn_metadata, SparseCPUMetadata)
        if self.pages_of is not kv_cache:
            self._bind(kv_cache)

        def dense(query: torch.Tensor, metadata: CPUAttentionMetadata, output: torch.Tensor) -> torch.Tensor:
            return super(SparseCPUImpl, self).forward(
                layer, query, key, value, self.token_rows, metadata, output, output_scale, output_block_scale
            )

        if not self.is_sparse:
            return dense(query, attn_metadata, output)
        # A layer that shares another's cache finds the statistics there.
        if attn_metadata.filled and self.statistics is not None and self.kv_sharing_target_layer_name is None:
            update_page_statistics(self.keys, self.statistics, *attn_metadata.filled)
        decode = attn_metadata.decode
        if decode is None:
            return dense(query, attn_metadata, output)
        if attn_metadata.dense is None:
            output[: attn_metadata.num_actual_tokens] = self._decode(query[: attn_metadata.num_actual_tokens], decode)
            return output
        rest = attn_metadata.dense_tokens
        output[rest] = dense(query[rest], attn_metadata.dense, torch.empty_like(output[rest]))
        output[decode.tokens] = self._decode(query[decode.tokens], decode)
        return output

    def _decode(self, query: torch.Tensor, decode: DecodeTokens) -> torch.Tensor:
        """Select and attend; `[num_tokens, num_heads, head_size]` in and out."""
        grouped = query.unflatten(1, (self.num_kv_heads, self.num_queries_per_kv))
        rows = self._rows(decode.block_table, decode.context_lens, decode.num_pages)
        if decode.sampled is not None and self.quality is not None:
            self._measure(grouped, rows, decode.sampled)
        if self.routing is None:
            return self._attend(grouped, rows)
        skipped = route_groups(grouped, self.keys, rows.block_table, rows.context_lens, self.routing)
        if self.routing.counts is not None:
            asked = torch.full((self.num_kv_heads,), len(query))
            self.routing.counts.add_(torch.stack([skipped.sum(dim=0), asked], dim=1))
        # The other groups form a batch of their own, each a token of a cache of one KV head.
        token, head = (~skipped).nonzero(as_tuple=True)
        blocks = rows.block_table[token] * self.num_kv_heads + head[:, None]
        active = _Rows(
            self.keys.by_head, self.values.by_head, self.statistics_by_head, blocks,
            rows.context_lens[token], rows.num_pages[token], head[:, None],
        )  # fmt: skip
        output = torch.zeros_like(grouped)
        output[token, head] = self._attend(grouped[token, head].unsqueeze(1), active)
        return output.flatten(1, 2)

    def _rows(self, block_table: torch.Tensor, context_lens: torch.Tensor, num_pages: torch.Tensor) -> _Rows:
        """All KV heads of tokens."""
        return _Rows(self.keys, self.values, self.statistics, block_table, context_lens, num_pages, self.all_heads)

    def _attend(self, grouped: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """Attention of `[num_tokens, num_kv_heads, group_size, head_size]` over the pages that the layer reads."""
        pages, counts = self._pages(grouped, rows)
        if counts is not None and self.counters is not None:
            self.counters.index_add_(0, rows.heads.expand(counts.shape[:2]).flatten(), counts.flatten(0, 1))
        return attend_pages(
            grouped,
            rows.keys,
            rows.values,
            rows.block_table,
            rows.context_lens,
            pages,
            self.scale,
            self.sinks,
            self.logits_soft_cap,
        )

    def _pages(self, grouped: torch.Tensor, rows: _Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The pages that the layer reads and, where attention may stop, what `count_visits` says of them."""
        if not self.selects:
            return every_page(rows.num_pages, grouped.shape[1]), None
        assert self.selection is not None
        if self.stop_rule is None:
            return self.selection.select(grouped, rows.statistics, rows.block_table, rows.num_pages), None
        return select_until_stable(
            self.selection,
            self.stop_rule,
            grouped,
            rows.keys,
            rows.values,
            rows.statistics,
            rows.block_table,
            rows.context_lens,
            self.scale,
            self.sinks,
            self.logits_soft_cap,
        )

    def _measure(self, grouped: torch.Tensor, rows: _Rows, sampled: int) -> None:
        """Records the quality of one token's selection, of all its groups."""
        assert self.quality is not None
        if not self.selects:
            return
        token = slice(sampled, sampled + 1)
        one = rows.at(token)
        self.quality.record(
            grouped[token],
            one.keys,
            one.values,
            one.block_table[0],
            int(one.context_lens),
            self._pages(grouped[token], one)[0],
            self.scale,
            self.sinks,
            self.logits_soft_cap,
        )
