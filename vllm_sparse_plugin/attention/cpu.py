"""The sparse decode pipeline inside vLLM's CPU build.

Prefill, short contexts, sliding-window layers and leading dense layers run vLLM's own CPU attention on the token
rows of the cache; decoding tokens of long contexts run select and attend. Which requests are which is decided once
per step by the metadata builder, from lengths alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sparse_kernels.page_statistics import StatisticsLayout, update_page_statistics
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
    SparseBackend,
    count_traversal,
    is_sparse_layer,
    layer_quality,
    report_memory,
)
from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.diagnostics.live import LayerQuality, StepSampler
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.policies import Selection
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
        self.pages = self.sparse.pages
        self.isa = packing.supported_isa(self.isa)
        self._set_isa_to_layers(layer_names)
        if self.pages is not None:
            packing.check_packing(self.isa, self.block_size, self.head_dim, self.pages.page_size, self.dtype)
        statistics = backend.statistics_layout(kv_cache_spec)
        self.sampler = StepSampler(self.sparse.config.diagnostics.sample_every)
        for layer in layers.values():
            layer.impl.configure(self.sparse, self.isa, self.block_size, statistics)
            layer.impl.is_sparse = is_sparse_layer(layer, self.sparse)
            if self.sampler.every:
                layer.impl.quality = layer_quality(layer, vllm_config)
        for impl in {layer.impl.num_heads: layer.impl for layer in layers.values() if layer.impl.is_sparse}.values():
            impl.warm_up(self.kv_cache_spec)
        self.traversal = count_traversal(layers.values(), vllm_config, device) if self.sparse.stop_rule else None
        if statistics is not None:
            report_memory(backend.get_name(), vllm_config, self.kv_cache_spec, statistics, len(layers))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseCPUMetadata:
        common = common_attn_metadata
        whole = super().build(common_prefix_len, common, fast_build)
        metadata = SparseCPUMetadata(**{field.name: getattr(whole, field.name) for field in fields(whole)})

        if self.pages is None:
            return metadata
        if self.traversal is not None:
            self.traversal.publish()

        page_size = self.pages.page_size
        slots = common.slot_mapping[: common.num_actual_tokens]
        filled = slots[(slots >= 0) & (slots % page_size == page_size - 1)]
        if len(filled):
            metadata.filled = filled // self.block_size, filled % self.block_size // page_size

        query_lens = common.query_start_loc[1:] - common.query_start_loc[:-1]
        sparse_requests = self._sparse_requests(common, query_lens, self.pages)
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

    def _sparse_requests(
        self, common: CommonAttentionMetadata, query_lens: torch.Tensor, pages: Selection
    ) -> torch.Tensor:
        """`[num_reqs]` bool: decoding requests whose context exceeds the budget."""
        assert self.reorder_batch_threshold is not None
        sparse = (query_lens > 0) & (query_lens <= self.reorder_batch_threshold)
        sparse &= common.seq_lens // pages.page_size > pages.budget_pages
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


class SparseCPUImpl(CPUAttentionBackendImpl):
    """One attention layer."""

    is_sparse: bool = False
    """Whether decoding tokens of this layer attend sparsely."""
    quality: LayerQuality | None = None
    """Measures sampled tokens, if any are to be."""
    counters: torch.Tensor | None = None
    """`[num_kv_heads, 4]` int64, see `count_visits`; only where attention may stop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        SparseBackend.remember_settings()
        if self.alibi_slopes is not None:
            raise ConfigurationError("model: got ALiBi position biases, allowed: models with rotary positions")

    def configure(self, sparse: ResolvedConfig, isa: str, block_size: int, statistics: StatisticsLayout | None) -> None:
        """What the metadata builder knows of the cache, for the layer's own use."""
        self.selection = sparse.pages
        self.stop_rule = sparse.stop_rule
        self.isa = isa
        self.block_size = block_size
        self.statistics_layout = statistics
        self.pages_of: torch.Tensor | None = None

    def warm_up(self, spec: AttentionSpec) -> None:
        """Compiles what this layer needs, on a cache of its own, so that no request waits for it."""
        self._bind(torch.zeros(2, self.num_kv_heads, spec.num_states, 2 * self.head_size, dtype=spec.dtype))
        first = torch.zeros(1, dtype=torch.int64)
        assert self.selection is not None
        lens = first + self.selection.page_size + 1
        if self.statistics is not None:
            update_page_statistics(self.keys, self.statistics, first, first)
        self._decode(
            torch.zeros(1, self.num_heads, self.head_size, dtype=spec.dtype),
            DecodeTokens(first, first.unsqueeze(1), lens, lens // self.selection.page_size),
        )
        self.pages_of = None

    def _bind(self, kv_cache: torch.Tensor) -> None:
        """Views of the layer's cache, made once: they cost as much as a kernel."""
        self.pages_of = kv_cache
        self.token_rows = kv_cache[:, :, : self.block_size]
        self.statistics = None
        if self.selection is None:
            return
        self.keys, self.values = packing.paged_keys_and_values(self.token_rows, self.isa, self.selection.page_size)
        if self.statistics_layout is not None:
            rows = kv_cache[:, :, self.block_size :]
            self.statistics = self.statistics_layout.views(rows, self.block_size)

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
        assert self.selection is not None
        grouped = query.unflatten(1, (self.num_kv_heads, self.num_queries_per_kv))
        if self.stop_rule is None:
            pages = self.selection.select(grouped, self.statistics, decode.block_table, decode.num_pages)
        else:
            pages = select_until_stable(
                self.selection,
                self.stop_rule,
                grouped,
                self.keys,
                self.values,
                self.statistics,
                decode.block_table,
                decode.context_lens,
                self.scale,
                self.sinks,
                self.logits_soft_cap,
                self.counters,
            )
        if decode.sampled is not None and self.quality is not None:
            token = slice(decode.sampled, decode.sampled + 1)
            self.quality.record(
                grouped[token],
                self.keys,
                self.values,
                decode.block_table[decode.sampled],
                int(decode.context_lens[decode.sampled]),
                pages[token],
                self.scale,
                self.sinks,
                self.logits_soft_cap,
            )
        return attend_pages(
            grouped,
            self.keys,
            self.values,
            decode.block_table,
            decode.context_lens,
            pages,
            self.scale,
            self.sinks,
            self.logits_soft_cap,
        )
