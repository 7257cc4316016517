"""The sparse decode pipeline on NVIDIA GPUs.

Prefill, sliding-window layers and leading dense layers run vLLM's FlashAttention on the token rows of the cache;
decoding tokens run one fused kernel, which attends short contexts whole, or, where they are routed or may stop but
select no pages, one that splits long contexts. What a step does is decided by the shape of its batch alone, so a batch
of decoding requests is one full CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.page_statistics import StatisticsLayout, write_cache
from sparse_kernels.paging import PagedTensor
from sparse_kernels.routed_attention import PIECES_BYTES, SPLITS, routed_attention, rows_at_once, stop_scratch
from sparse_kernels.sparse_decode import sparse_decode
from vllm.config import VllmConfig, get_current_vllm_config_or_none, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVCacheSpec

from vllm_sparse_plugin.admission import CUDA_HEAD_SIZES, CUDA_KERNEL_BLOCK, block_multiple
from vllm_sparse_plugin.attention.base import (
    DecodeRun,
    RoutedLayers,
    SparseBackend,
    context_reads_of,
    count_visits_of,
    decode_runs,
    layer_quality,
    report_memory,
    selects_pages,
)
from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.diagnostics.live import LayerQuality, StepSampler
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.termination import select_until_stable

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType

_PREFERRED_BLOCK = 64
"""Tokens of a block unless the user says otherwise: the statistics of a block and head are then one kilobyte in a row,
which is what memory reads well."""


def splits_for(max_requests: int, num_heads: int, head_size: int) -> int:
    """Pieces that a context is cut into, at most: one number for an engine, for a batch must not change a bit."""
    piece_bytes = max_requests * num_heads * head_size * 4
    return max(8, min(SPLITS, PIECES_BYTES // piece_bytes))


class SparseCUDABackend(SparseBackend, FlashAttentionBackend):
    """Sparse decode attention on NVIDIA GPUs; a subclass per registered name."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_impl_cls() -> type[SparseCUDAImpl]:
        return SparseCUDAImpl

    @staticmethod
    def get_builder_cls() -> type[SparseCUDAMetadataBuilder]:
        return SparseCUDAMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # A page of one head must be contiguous.
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        pages = cls.config().pages
        unit: int = pages.page_size if pages else 1
        if isinstance(kv_cache_spec, AttentionSpec) and (layout := cls.statistics_layout(kv_cache_spec)):
            unit = layout.unit_tokens
        return [MultipleOf(math.lcm(CUDA_KERNEL_BLOCK, unit))]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        current = get_current_vllm_config_or_none()
        if current is None or current.model_config is None:
            return max(default_block_size, _PREFERRED_BLOCK)
        multiple = math.lcm(_PREFERRED_BLOCK, block_multiple(current, cls.config(), CUDA_KERNEL_BLOCK))
        return math.ceil(default_block_size / multiple) * multiple

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        if not cls.config().is_sparse:
            return bool(super().supports_head_size(head_size))
        return head_size in CUDA_HEAD_SIZES

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False


@dataclass
class DecodeRequests:
    """Consecutive requests of a step that decode, all with the same number of query tokens."""

    tokens: slice
    """Their query tokens in the batch."""
    block_table: torch.Tensor
    """`[num_requests, max_blocks]` int32."""
    seq_lens: torch.Tensor
    """`[num_requests]` int32; 0 for padding."""
    dense: torch.Tensor
    """`[num_requests]` bool, those that attend densely: single tokens of a prompt."""


@dataclass
class SparseCUDAMetadata(FlashAttentionMetadata):
    """FlashAttention's metadata for the whole batch, and what sparse layers do instead."""

    decode: list[DecodeRequests] = field(default_factory=list)
    """The requests that decode, at the front of the batch (`num_decode_tokens` of it): one run of them unless they
    speculate differently far."""
    prefill: FlashAttentionMetadata | None = None
    """Metadata of the batch that the other requests form; None if there are none."""
    sampled: int | None = None
    """Index of the decoding token whose selection is measured, if one's is."""


class SparseCUDAMetadataBuilder(FlashAttentionMetadataBuilder):
    """Splits each step into requests that decode and requests that prefill."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = False

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.supports_draft_decode_metadata_update = False
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        backend: type[SparseCUDABackend] = next(iter(layers.values())).attn_backend
        sparse = backend.config()
        statistics = backend.statistics_layout(kv_cache_spec)
        self.sampler = StepSampler(sparse.config.diagnostics.sample_every)
        # What captured graphs read: never reallocated.
        max_requests = max(vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        self.dense_requests = torch.zeros(max_requests, dtype=torch.bool, device=device)
        self.any_dense_request = False
        scratch = self._stop_scratch(layers, sparse, max_requests)
        routed = RoutedLayers(layers, sparse, vllm_config, device)
        for name, layer in layers.items():
            layer.impl.configure(sparse, self.block_size, statistics)
            layer.impl.selects = selects_pages(layer, sparse)
            layer.impl.routing = routed.of_layer.get(name)
            layer.impl.scratch = scratch
            layer.impl.splits = splits_for(max_requests, layer.num_heads, layer.head_size)
            if self.sampler.every:
                layer.impl.quality = layer_quality(layer, vllm_config)
        visits = count_visits_of(layers, sparse, vllm_config, device)
        self.counts = [counts for counts in (routed.counts, visits) if counts is not None]
        self.reads = context_reads_of(layers, sparse, self.reorder_batch_threshold)
        self.any_dense_layer = not all(layer.impl.is_sparse for layer in layers.values())
        self.any_sparse_layer = any(layer.impl.is_sparse for layer in layers.values())
        if statistics is not None:
            report_memory(backend.get_name(), vllm_config, kv_cache_spec, statistics, len(layers))

    def _stop_scratch(
        self, layers: dict[str, Attention], sparse: ResolvedConfig, max_requests: int
    ) -> torch.Tensor | None:
        """What layers that may stop anywhere share, for they run one after the other; None if none may."""
        rule, longest = sparse.stop_rule, self.reorder_batch_threshold
        if rule is None or not sparse.stops_everywhere:
            return None
        assert longest is not None
        # vLLM may pad the rows of a block table.
        context_tokens = self.vllm_config.model_config.max_model_len + 64 * self.block_size
        pieces, tokens = context_tokens // rule.block_tokens, max_requests * longest
        num_rows = max(
            min(
                tokens * layer.num_kv_heads,
                rows_at_once(pieces, layer.num_heads // layer.num_kv_heads, layer.head_size),
            )
            for layer in layers.values()
        )
        return stop_scratch(num_rows, context_tokens, rule, self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseCUDAMetadata:
        common = common_attn_metadata
        for counts in self.counts:
            counts.step()
        if self.reads is not None:
            self.reads.step(common.seq_lens_cpu_upper_bound, common.query_start_loc_cpu, common.is_prefilling)
        runs = self._decode_runs(common) if self.any_sparse_layer else []
        num_decodes = sum(run.num_requests for run in runs)
        num_decode_tokens = sum(run.num_tokens for run in runs)
        whole = None
        if self.any_dense_layer or not num_decodes:
            whole = super().build(common_prefix_len, common, fast_build)
            metadata = SparseCUDAMetadata(**{item.name: getattr(whole, item.name) for item in fields(whole)})
        else:
            metadata = SparseCUDAMetadata(
                num_actual_tokens=common.num_actual_tokens,
                max_query_len=common.max_query_len,
                query_start_loc=common.query_start_loc,
                max_seq_len=common.max_seq_len,
                seq_lens=common.seq_lens,
                block_table=common.block_table_tensor,
                slot_mapping=common.slot_mapping,
            )
        metadata.num_decode_tokens = num_decode_tokens
        metadata.sampled = self.sampler.pick(num_decode_tokens)
        if num_decodes:
            dense = self._dense_requests(common, num_decodes)
            for run in runs:
                requests = slice(run.first_request, run.first_request + run.num_requests)
                tokens = slice(run.first_token, run.first_token + run.num_tokens)
                metadata.decode.append(
                    DecodeRequests(
                        tokens, common.block_table_tensor[requests], common.seq_lens[requests], dense[requests]
                    )
                )
        if num_decodes < common.num_reqs:
            if num_decodes:
                # The schedule that FlashAttention plans ahead lies in one buffer, which the whole batch's may hold.
                rest = _without_first(common, num_decodes, num_decode_tokens)
                metadata.prefill = super().build(common_prefix_len, rest, fast_build=True)
            else:
                metadata.prefill = whole
        return metadata

    def _decode_runs(self, common: CommonAttentionMetadata) -> list[DecodeRun]:
        longest = self.reorder_batch_threshold
        assert longest is not None
        num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
        _, num_prefills, _, _ = split_decodes_and_prefills(common, decode_threshold=longest, require_uniform=True)
        if num_prefills == 0 and num_tokens % num_reqs == 0:
            # A graph's batch may be padded by requests without query tokens.
            return [DecodeRun(0, num_reqs, 0, num_tokens)]
        start = common.query_start_loc_cpu
        return decode_runs((start[1:] - start[:-1]).tolist(), longest)

    def _dense_requests(self, common: CommonAttentionMetadata, num_decodes: int) -> torch.Tensor:
        dense = self.dense_requests[:num_decodes]
        prefilling = None if common.is_prefilling is None else common.is_prefilling[:num_decodes]
        if prefilling is not None and prefilling.any():
            # Of the requests that pad a graph's batch it may say nothing.
            self.dense_requests.zero_()
            dense[: len(prefilling)].copy_(prefilling, non_blocking=True)
            self.any_dense_request = True
        elif self.any_dense_request:
            self.dense_requests.zero_()
            self.any_dense_request = False
        return dense


def _without_first(common: CommonAttentionMetadata, requests: int, tokens: int) -> CommonAttentionMetadata:
    """The batch without its first requests."""
    start = common.query_start_loc_cpu[requests:] - tokens
    bound = common.seq_lens_cpu_upper_bound
    return common.replace(
        query_start_loc=common.query_start_loc[requests:] - tokens,
        query_start_loc_cpu=start,
        seq_lens=common.seq_lens[requests:],
        seq_lens_cpu_upper_bound=None if bound is None else bound[requests:],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[requests:],
        num_reqs=common.num_reqs - requests,
        num_actual_tokens=common.num_actual_tokens - tokens,
        max_query_len=int((start[1:] - start[:-1]).max()),
        block_table_tensor=common.block_table_tensor[requests:],
        slot_mapping=common.slot_mapping[tokens:],
    )


class SparseCUDAImpl(FlashAttentionImpl):
    """One attention layer."""

    supports_dcp: bool = False
    can_return_lse_for_decode: bool = False
    selects: bool = False
    """Whether decoding tokens of this layer read selected pages."""
    routing: GroupRouting | None = None
    """Which KV groups they skip, if any."""
    splits: int = SPLITS
    """Pieces of a context, at most, where every page is read to the end."""
    scratch: torch.Tensor | None = None
    """See `stop_scratch`; only where every page may be read."""
    quality: LayerQuality | None = None
    """Measures sampled tokens, if any are to be."""
    counters: torch.Tensor | None = None
    """`[num_kv_heads, 4]` int64, see `count_visits`; only where attention may stop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        SparseBackend.remember_settings()
        if self.alibi_slopes is not None:
            raise ConfigurationError("model: got ALiBi position biases, allowed: models with rotary positions")
        self.sink_logits: torch.Tensor | None = None
        self.bound_to: torch.Tensor | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether decoding tokens of this layer attend in our kernels."""
        return self.selects or self.routing is not None

    def configure(self, sparse: ResolvedConfig, block_size: int, statistics: StatisticsLayout | None) -> None:
        """What the metadata builder knows of the cache, for the layer's own use."""
        # Without a selection nothing follows from the size of a page.
        self.page_size = sparse.pages.page_size if sparse.pages else CUDA_KERNEL_BLOCK
        self.selection = sparse.pages
        self.stop_rule = sparse.stop_rule
        self.decode_settings = sparse.pages.decode_settings() if sparse.pages else None
        self.dense_tokens = sparse.config.min_context_tokens - 1
        self.block_size = block_size
        self.statistics_layout = statistics

    def _bind(self, kv_cache: torch.Tensor) -> None:
        """Views of the layer's cache, made once."""
        if kv_cache.dtype == torch.uint8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        self.token_rows = kv_cache[:, :, : self.block_size]
        self.keys = PagedTensor.from_rows(self.token_rows[..., : self.head_size], self.page_size)
        self.values = PagedTensor.from_rows(self.token_rows[..., self.head_size :], self.page_size)
        self.statistics = None
        if self.selects and self.statistics_layout is not None:
            self.statistics = self.statistics_layout.views(kv_cache[:, :, self.block_size :], self.block_size)
        if self.sinks is not None:
            self.sink_logits = self.sinks.float()

    def _bound(self, kv_cache: torch.Tensor) -> None:
        if self.bound_to is not kv_cache:
            self._bind(kv_cache)
            self.bound_to = kv_cache

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        self._bound(kv_cache)
        scales: Any = layer
        write_cache(
            key, value, self.token_rows, self.statistics, slot_mapping, self.page_size, scales._k_scale, scales._v_scale
        )

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output.fill_(0)
        assert isinstance(attn_metadata, SparseCUDAMetadata)
        self._bound(kv_cache)

        def dense(metadata: FlashAttentionMetadata, first: int) -> None:
            super(SparseCUDAImpl, self).forward(
                layer, query[first:], key[first:], value[first:], self.token_rows, metadata, output[first:],
                output_scale, output_block_scale,
            )  # fmt: skip

        if not self.is_sparse:
            dense(attn_metadata, 0)
            return output
        scales: Any = layer
        eight_bit_query, eight_bit_cache = query.dtype.itemsize == 1, self.keys.view.dtype.itemsize == 1
        for decode in attn_metadata.decode:
            more: dict[str, Any] = {
                "dense_tokens": self.dense_tokens,
                "dense_requests": decode.dense,
                "routing": self.routing,
                "scale": self.scale,
                "softcap": self.logits_soft_cap,
                "query_scale": scales._q_scale if eight_bit_query else None,
                "key_scale": scales._k_scale if eight_bit_cache else None,
                "value_scale": scales._v_scale if eight_bit_cache else None,
                "out": output[decode.tokens],
            }
            own = query[decode.tokens]
            if not self.selects:
                routed_attention(
                    own, self.keys, self.values, decode.block_table, decode.seq_lens, splits=self.splits, **more
                )
                continue
            more |= {"sinks": self.sink_logits, "rule": self.stop_rule, "counters": self.counters}
            if self.decode_settings is None:
                assert self.selection is not None
                routed_attention(
                    own,
                    self.keys,
                    self.values,
                    decode.block_table,
                    decode.seq_lens,
                    sink_pages=self.selection.sink_pages,
                    scratch=self.scratch,
                    **more,
                )
            else:
                sparse_decode(
                    own,
                    self.keys,
                    self.values,
                    self.statistics,
                    decode.block_table,
                    decode.seq_lens,
                    **self.decode_settings._asdict(),
                    **more,
                )
            sampled = attn_metadata.sampled
            if sampled is not None and decode.tokens.start <= sampled < decode.tokens.stop:
                self._measure(query, decode, sampled, scales)
        if attn_metadata.prefill:
            dense(attn_metadata.prefill, attn_metadata.num_decode_tokens)
        return output

    def _measure(self, query: torch.Tensor, decode: DecodeRequests, sampled: int, scales: Any) -> None:
        """Records the quality of one token's selection; waits for the device, so never part of a CUDA graph."""
        assert self.selection is not None
        if self.quality is None:
            return
        per_request = (decode.tokens.stop - decode.tokens.start) // len(decode.seq_lens)
        request, index = divmod(sampled - decode.tokens.start, per_request)
        context = int(decode.seq_lens[request]) - (per_request - 1 - index)
        complete = context // self.page_size
        if context <= self.dense_tokens or complete <= self.selection.budget_pages or decode.dense[request]:
            return
        scale, row = self.scale, query[sampled : sampled + 1]
        if row.dtype.itemsize == 1:
            scale *= float(scales._q_scale)
        if self.keys.view.dtype.itemsize == 1:
            scale *= float(scales._k_scale)
        grouped = row.to(torch.bfloat16).unflatten(1, (self.num_kv_heads, -1))
        table = decode.block_table[request]
        if self.stop_rule is None:
            num_pages = torch.tensor([complete], device=query.device)
            pages = self.selection.select(grouped, self.statistics, table[None].long(), num_pages)
        else:
            rule = self.stop_rule
            if self.values.view.dtype.itemsize == 1:
                # Of the values as they are meant, not as they are stored.
                rule = rule._replace(scale_tolerance=rule.scale_tolerance / float(scales._v_scale))
            context_lens = torch.tensor([context], device=query.device)
            pages, _ = select_until_stable(
                self.selection, rule, grouped, self.keys, self.values, self.statistics, table[None].long(),
                context_lens, scale, self.sink_logits, self.logits_soft_cap,
            )  # fmt: skip
        self.quality.record(
            grouped, self.keys, self.values, table, context, pages, scale, self.sink_logits, self.logits_soft_cap
        )
