"""Runs the sparse pipeline on NVIDIA GPUs.

Short prompts, sliding-window layers, leading dense layers and, unless it is sparse, prefill run vLLM's FlashAttention
on the token rows of the cache; sparse prefill runs it on blocks that the tiles of long prompts choose, or on the tokens
that a layer keeps of them. Decoding tokens
run one fused kernel, which attends short contexts whole, or, where they are routed or may stop but select no pages, one
that splits long contexts. Steps that verify drafts attend densely, with all tokens of a request at once. Where
positions roll, all tokens run one kernel. What a step does is decided by the shape of its batch alone, so a batch of
decoding requests is one full CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sparse_kernels.batch import DecodeBatch, DecodeOutput, PrefillBatch, Prompts, QueryTokens
from sparse_kernels.block_prefill import VarlenAttention, VirtualSequences, scratch_bytes
from sparse_kernels.cache import KVCache
from sparse_kernels.compaction import ObservationWindow
from sparse_kernels.group_routing import route_groups
from sparse_kernels.limits import HEAD_SIZES
from sparse_kernels.multi_token_decode import multi_token_decode
from sparse_kernels.page_coverage import Coverage, count_rows
from sparse_kernels.page_statistics import write_cache
from sparse_kernels.page_topk import best_first, select_pages
from sparse_kernels.rolling_attention import attend_rolling
from sparse_kernels.sparse_decode import sparse_decode
from sparse_kernels.split_attention import pieces_of, rows_at_once, split_attention, splits_for, stop_scratch
from sparse_kernels.token_prefill import KeptAttention
from vllm.config import ModelConfig, VllmConfig, get_current_vllm_config_or_none, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVCacheSpec

from vllm_sparse_plugin.admission import CUDA_KERNEL_BLOCK, block_multiple
from vllm_sparse_plugin.attention.base import (
    DecodeRun,
    SparseBackend,
    SparseImpl,
    decode_runs,
    plan_compaction,
    report_memory,
)
from vllm_sparse_plugin.attention.metering import Meter
from vllm_sparse_plugin.attention.plan import LayerPlan, plan_layers
from vllm_sparse_plugin.attention.prefill import PromptKernels, PromptRound, attend_prompts, plan_rounds, reads_less
from vllm_sparse_plugin.attention.stopping import select_until_stable
from vllm_sparse_plugin.compaction.step import Observed, StepCompaction
from vllm_sparse_plugin.config import BlockPrefill
from vllm_sparse_plugin.metrics.sampling import UNMEASURED, Sample, dropping
from vllm_sparse_plugin.policies.base import PagesRead
from vllm_sparse_plugin.policies.scored import ScoredSelection
from vllm_sparse_plugin.requests import rows
from vllm_sparse_plugin.requests.arguments import EVERY_PAGE
from vllm_sparse_plugin.requests.limits import StepBudgets, StepNumbers

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType

_PREFERRED_BLOCK = 64
"""Tokens of a block unless the user says otherwise: the statistics of a block and head are then one kilobyte in a row,
which is what memory reads well."""
_TOKEN_SCRATCH = 300 * 2**20
"""Bytes beside queries and outputs that a choice of tokens takes in a layer; it grows with the longest context by about
100 bytes a token."""

_WINDOW_SCRATCH = 256 * 2**20
"""Bytes of the queries that all layers keep of prompts until their tokens are chosen: eight megabytes a prompt in a
model of 32 layers with 32 heads of 128 and windows of 32 tokens."""


_COLD = "its kernels are compiled when a prompt needs them"
"""What the log says where the warm-up of compaction fails."""


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
        selector, current = cls.config().selector, get_current_vllm_config_or_none()
        unit: int = selector.page_size if selector else 1
        if isinstance(kv_cache_spec, AttentionSpec):
            layout = cls.statistics_layout(kv_cache_spec)
            unit = layout.unit_tokens if layout else unit
        elif current is not None and current.model_config is not None:
            # vLLM asks without a specification when it looks for blocks that several backends take.
            unit = block_multiple(current, cls.config(), unit)
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
        if not cls.config().runs_kernels:
            return bool(super().supports_head_size(head_size))
        return head_size in HEAD_SIZES

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
    """`[num_requests]` bool, those that attend densely: single tokens of a prompt, and those that say so."""
    budgets: torch.Tensor | None = None
    """`[num_requests]` int32, pages that a selection reads of each; None where all have the settings' budget."""
    coverage: Coverage | None = None
    """Until what share of the attention weight each request reads; None where lengths and budgets decide."""


class SampledToken(NamedTuple):
    """A decoding token whose selection is measured, as far as the host knows it."""

    token: int
    """Its place in the batch."""
    longest: int
    """Its context, at most."""
    pages: int
    """Complete pages that it reads; under a coverage at most."""
    sample: Sample
    """In which layers."""
    masses: torch.Tensor | None = None
    """Where the estimated masses of its request are added up; None where nobody asks for them."""


@dataclass
class SparseCUDAMetadata(FlashAttentionMetadata):
    """FlashAttention's metadata for the whole batch, and what sparse layers do instead."""

    decode: list[DecodeRequests] = field(default_factory=list)
    """The requests that decode, at the front of the batch (`num_decode_tokens` of it): one run of them unless they
    speculate differently far."""
    prefill: FlashAttentionMetadata | None = None
    """Metadata of the batch that the other requests form; None if there are none."""
    dense_decode: FlashAttentionMetadata | None = None
    """Metadata of the requests that decode, for layers that are dense but in prefill; only beside `rounds`."""
    rounds: list[PromptRound] = field(default_factory=list)
    """The requests that prefill, for layers whose prefill is sparse; empty if they all read everything."""
    observed: list[Observed] = field(default_factory=list)
    """Tokens of prompts whose queries are kept for a vote."""
    sampled: SampledToken | None = None
    """The decoding token whose selection is measured, if one's is."""
    verified: DecodeRequests | None = None
    """All requests of a step that does nothing but verify drafts: they attend densely."""


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
        assert self.reorder_batch_threshold is not None
        self.meter = Meter(sparse, vllm_config, self.reorder_batch_threshold)
        self.selector, self.dense_tokens = sparse.selector, sparse.config.min_context_tokens - 1
        # Lossless mode goes without sparse prefill, so a step that answers leaves nothing out.
        self.answers_sparsely = sparse.lossless is None
        # FlashAttention rounds weights to 8 bits over a cache of 8 bits. A token that is verified has to be what it is
        # alone, so all tokens run that kernel there.
        self.verifies_at_once = not self.answers_sparsely and kv_cache_spec.dtype.itemsize > 1
        self.rolls = sparse.rolling_window is not None
        self.compaction = plan_compaction(layers, sparse, kv_cache_spec, vllm_config, device)
        # Captured graphs read these tensors.
        max_requests = max(vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        self.dense_requests = StepNumbers(False, max_requests, torch.bool, device)
        self.budgets = StepBudgets(sparse, rows.current_if_any(), max_requests, device)
        group = plan_layers(layers, sparse, vllm_config, self.block_size, statistics, device)
        self.counts = group.counts
        self.reads = group.reads
        max_tokens = max_requests * self.reorder_batch_threshold
        scratch = self._stop_scratch(layers, group.plans, max_tokens)
        for name, layer in layers.items():
            layer.impl.bind(group.plans[name])
            layer.impl.splits = splits_for(max_tokens, layer.num_heads, layer.head_size)
            layer.impl.scratch = scratch
        metered = {(layer.num_heads, layer.head_size): layer for layer in layers.values() if layer.impl.plan.quality}
        for layer in metered.values():
            layer.impl.warm_up_meter(layer, kv_cache_spec, vllm_config.model_config.max_model_len, device)
        if self.compaction is not None:
            for layer in {(layer.num_heads, layer.head_size): layer for layer in layers.values()}.values():
                layer.impl.warm_up_compaction(layer, kv_cache_spec, vllm_config.model_config, self.compaction, device)
        self.any_dense_layer = not all(plan.is_sparse for plan in group.plans.values())
        self.any_sparse_layer = any(plan.is_sparse for plan in group.plans.values())
        self.prefill_rule, self.group_sizes = group.prefill_rule, group.group_sizes
        self.any_dense_decode = any(plan.prefill and not plan.is_sparse for plan in group.plans.values())
        if statistics is not None:
            report_memory(backend.get_name(), vllm_config, kv_cache_spec, statistics, len(layers))

    def _stop_scratch(
        self, layers: dict[str, Attention], plans: dict[str, LayerPlan], max_tokens: int
    ) -> torch.Tensor | None:
        """Makes the scratch that layers which may stop anywhere share, one after the other; None if none may."""
        # vLLM may pad the rows of a block table.
        context_tokens = self.vllm_config.model_config.max_model_len + 64 * self.block_size
        scratch: torch.Tensor | None = None
        for name, layer in layers.items():
            stopping = plans[name].stopping()
            if stopping is None:
                continue
            most_rows = rows_at_once(
                pieces_of(context_tokens, stopping.rule), layer.num_heads // layer.num_kv_heads, layer.head_size
            )
            rows = min(max_tokens * layer.num_kv_heads, most_rows)
            wanted = stop_scratch(stopping.rule, rows, context_tokens, self.device)
            scratch = wanted if scratch is None or len(wanted) > len(scratch) else scratch
        return scratch

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseCUDAMetadata:
        return self._build(common_prefix_len, common_attn_metadata, fast_build, self.answers_sparsely)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> SparseCUDAMetadata:
        return self._build(0, common_attn_metadata, fast_build=True, selects=True)

    def _build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool, selects: bool
    ) -> SparseCUDAMetadata:
        """Builds the metadata of a step; `selects` says whether decoding tokens may attend sparsely in it."""
        if self.compaction is not None:
            common = self.compaction.condense(common)
        for counts in self.counts:
            counts.step()
        own = self.budgets.step(common)
        if self.reads is not None and selects:
            self.reads.step(
                common, self.reorder_batch_threshold, self.budgets.by_request(own, common.num_reqs),
                self.meter.log_of(common),
            )  # fmt: skip
        runs, prompts = self._split(common) if selects else ([], None)
        num_decodes = sum(run.num_requests for run in runs)
        num_decode_tokens = sum(run.num_tokens for run in runs)
        whole, verifies = None, not selects and self.verifies_at_once and self._verifies(common)
        # Where positions roll, and where drafts are verified, no layer runs FlashAttention.
        if not self.rolls and not verifies and (self.any_dense_layer or not num_decodes):
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
        metadata.observed = [] if self.compaction is None else self.compaction.observed
        if num_decodes:
            whole_requests = self._write_dense_requests(common, num_decodes, own)
            if self.meter.sample is not None:
                with dropping(UNMEASURED):
                    metadata.sampled = self._sampled(self.meter.sample, common, runs, own, whole_requests)
            dense, budgets = self.dense_requests.tensor, self.budgets.pages
            for run in runs:
                those = slice(run.first_request, run.first_request + run.num_requests)
                tokens = slice(run.first_token, run.first_token + run.num_tokens)
                metadata.decode.append(
                    DecodeRequests(
                        tokens, common.block_table_tensor[those], common.seq_lens[those], dense[those],
                        None if budgets is None else budgets.tensor[those], self.budgets.coverage_of(those),
                    )
                )  # fmt: skip
        if verifies:
            every = slice(0, common.num_actual_tokens)
            nobody = self.dense_requests.tensor[: common.num_reqs]
            metadata.verified = DecodeRequests(every, common.block_table_tensor, common.seq_lens, nobody)
        elif num_decodes < common.num_reqs:
            if num_decodes:
                # The schedule that FlashAttention plans ahead lies in one buffer, which the whole batch's may hold.
                prefills = _without_first(common, num_decodes, num_decode_tokens)
                metadata.prefill = super().build(common_prefix_len, prefills, fast_build=True)
            else:
                metadata.prefill = whole
        if prompts is not None:
            assert self.prefill_rule is not None
            most_tokens = self.vllm_config.model_config.max_model_len
            metadata.rounds = plan_rounds(prompts, self.prefill_rule, self.group_sizes, most_tokens)
            if num_decodes and self.any_dense_decode:
                decodes = _first(common, num_decodes, num_decode_tokens)
                metadata.dense_decode = super().build(common_prefix_len, decodes, fast_build=True)
        return metadata

    def _split(self, common: CommonAttentionMetadata) -> tuple[list[DecodeRun], Prompts | None]:
        """Returns the requests that decode, and the others if some of them attend sparsely.

        Where all layers are dense there are none that decode, unless others attend sparsely: vLLM then takes the batch
        as it is.
        """
        rule = self.prefill_rule
        if rule is None and not self.any_sparse_layer:
            return [], None
        runs = self._decode_runs(common)
        first = sum(run.num_requests for run in runs)
        bound = common.seq_lens_cpu_upper_bound
        if rule is None or first == common.num_reqs:
            return runs if self.any_sparse_layer else [], None
        others = common.num_reqs - first
        longest = [common.max_seq_len] * others if bound is None else bound[first:].tolist()
        if not any(reads_less(rule, length) for length in longest):
            return runs if self.any_sparse_layer else [], None
        starts = common.query_start_loc_cpu[first:]
        prompts = Prompts(
            common.query_start_loc[first:] - sum(run.num_tokens for run in runs),
            common.block_table_tensor[first:],
            common.seq_lens[first:],
            tuple((starts[1:] - starts[:-1]).tolist()),
            tuple(longest),
        )
        return runs, prompts

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

    def _verifies(self, common: CommonAttentionMetadata) -> bool:
        """Whether a step that attends densely has as many tokens of every request: the newest one and its drafts."""
        assert self.reorder_batch_threshold is not None
        per_request = common.max_query_len
        is_uniform = common.num_actual_tokens == per_request * common.num_reqs
        return is_uniform and 1 < per_request <= self.reorder_batch_threshold

    def _write_dense_requests(
        self, common: CommonAttentionMetadata, num_decodes: int, own: Sequence[PagesRead | None]
    ) -> NDArray[np.bool_]:
        """Writes, and returns, which of the first requests are attended whole."""
        dense = np.zeros(num_decodes, dtype=bool)
        if common.is_prefilling is not None:
            # It may leave out the requests that pad a graph's batch.
            prefilling = common.is_prefilling.numpy()[:num_decodes]
            dense[: len(prefilling)] |= prefilling
        for request, pages in enumerate(own[:num_decodes]):
            dense[request] |= pages is not None and pages.least >= EVERY_PAGE
        self.dense_requests.write(dense.tolist() if dense.any() else [])
        return dense

    def _sampled(
        self,
        sample: Sample,
        common: CommonAttentionMetadata,
        runs: Sequence[DecodeRun],
        own: Sequence[PagesRead | None],
        whole_requests: NDArray[np.bool_],
    ) -> SampledToken | None:
        """Returns the decoding token that a sample is of: one that leaves something out, if there is any."""
        bound = common.seq_lens_cpu_upper_bound
        if self.selector is None or bound is None:
            return None
        tokens: list[tuple[int, SampledToken]] = []
        for run in runs:
            per_request = run.num_tokens // run.num_requests
            for place in range(run.num_requests):
                request = run.first_request + place
                if request >= len(bound) or whole_requests[request]:
                    continue
                said = own[request] if request < len(own) else None
                reads = self.selector.pages_read if said is None else said
                for position in range(per_request):
                    index = run.first_token + place * per_request + position
                    longest = int(bound[request]) - (per_request - 1 - position)
                    num_pages = longest // self.selector.page_size
                    if longest > self.dense_tokens and num_pages > reads.least:
                        most = min(reads.most, num_pages)
                        tokens.append((request, SampledToken(index, longest, most, sample)))
        if not tokens:
            return None
        request, sampled = tokens[sample.token % len(tokens)]
        return sampled._replace(masses=self.meter.masses_of(common, request))


def _without_first(common: CommonAttentionMetadata, requests: int, tokens: int) -> CommonAttentionMetadata:
    """Returns the batch without its first requests."""
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


def _first(common: CommonAttentionMetadata, requests: int, tokens: int) -> CommonAttentionMetadata:
    """Returns the batch of the first requests."""
    start = common.query_start_loc_cpu[: requests + 1]
    bound = common.seq_lens_cpu_upper_bound
    return common.replace(
        query_start_loc=common.query_start_loc[: requests + 1],
        query_start_loc_cpu=start,
        seq_lens=common.seq_lens[:requests],
        seq_lens_cpu_upper_bound=None if bound is None else bound[:requests],
        is_prefilling=None if common.is_prefilling is None else common.is_prefilling[:requests],
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=int((start[1:] - start[:-1]).max()),
        block_table_tensor=common.block_table_tensor[:requests],
        slot_mapping=common.slot_mapping[:tokens],
    )


class SparseCUDAImpl(SparseImpl, FlashAttentionImpl):
    """One attention layer."""

    supports_dcp: bool = False
    can_return_lse_for_decode: bool = False
    splits: int
    """Pieces of a context, at most, where every page is read to the end."""
    scratch: torch.Tensor | None
    """See `Stopping.scratch`; only where every page may be read."""

    def _make_views(self, kv_cache: torch.Tensor) -> None:
        if kv_cache.dtype == torch.uint8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        self.token_rows = kv_cache[:, :, : self.plan.block_size]
        self._make_caches(kv_cache, lambda page_size: KVCache.from_rows(self.token_rows, page_size))

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        self.bind_cache(kv_cache)
        scales: Any = layer
        cache = self.statistics_cache or self.cache
        write_cache(
            key, value, self.token_rows, cache.statistics, slot_mapping, cache.page_size, scales._k_scale,
            scales._v_scale,
        )  # fmt: skip

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            self._reserve(layer, query)
            return output.fill_(0)
        assert isinstance(attn_metadata, SparseCUDAMetadata)
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
        attn_metadata: SparseCUDAMetadata,
        output: torch.Tensor,
        output_scales: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        """Attends with all tokens of a step; arguments are those of `forward`."""

        def dense(metadata: FlashAttentionMetadata, first: int) -> None:
            # A layer that shares the cache of another has no keys and values of its own.
            new_keys, new_values = (None if new is None else new[first:] for new in (key, value))
            super(SparseCUDAImpl, self).forward(
                layer, query[first:], new_keys, new_values, self.token_rows, metadata, output[first:], *output_scales
            )

        if self.plan.rolling is not None:
            self._attend_rolling(layer, query, attn_metadata, output)
            return
        verified = attn_metadata.verified
        if verified is not None:
            heads = DecodeOutput(output[verified.tokens])
            multi_token_decode(
                self._batch_of(layer, query, verified), self._scaled(self.cache, layer), self.softmax, heads
            )
            return
        rounds = attn_metadata.rounds if self.plan.prefill is not None else []
        if not self.plan.is_sparse and not rounds:
            dense(attn_metadata, 0)
            return
        first = attn_metadata.num_decode_tokens
        if self.plan.is_sparse:
            self._decode_all(layer, query, attn_metadata, output)
        elif attn_metadata.dense_decode is not None:
            dense(attn_metadata.dense_decode, 0)
        if rounds:
            self._prefill(layer, query[first:], rounds, output[first:])
        elif attn_metadata.prefill is not None:
            dense(attn_metadata.prefill, first)

    def _attend_rolling(
        self, layer: Any, query: torch.Tensor, metadata: SparseCUDAMetadata, output: torch.Tensor
    ) -> None:
        """Attends with rolling positions; the tensors of the metadata are buffers of vLLM's, which graphs may read."""
        assert self.plan.rolling is not None
        window, rotation = self.plan.rolling
        batch = PrefillBatch(
            query, metadata.query_start_loc, metadata.block_table, metadata.seq_lens, metadata.max_query_len,
            metadata.max_seq_len,
        )  # fmt: skip
        attend_rolling(batch, self._scaled(self.cache, layer), self.softmax, window, rotation, output)

    def _reserve(self, layer: Any, query: torch.Tensor) -> None:
        """Takes the memory of sparse prefill, or of compaction, for a moment: vLLM's profile of its memory then leaves
        room for it."""
        backend: type[SparseCUDABackend] = layer.attn_backend
        config, wanted, longest = backend.config(), 0, self.model_size.longest_context
        if config.moves_tokens:
            assert config.compaction is not None
            # Votes and their order, and the queries of prompts that end in one step.
            wanted = _WINDOW_SCRATCH + 40 * self.num_kv_heads * longest
            if config.compaction.retention().counts_every_query:
                # The votes of a prompt that is still being computed, in all layers.
                wanted += 4 * self.num_kv_heads * longest * self.model_size.num_layers
        if isinstance(config.prefill, BlockPrefill):
            itemsize = query.dtype.itemsize if self.kv_cache_dtype == "auto" else 1
            layout = config.statistics_layout(self.head_size, itemsize)
            assert layout is not None
            tiles = scratch_bytes(
                config.prefill.rule(), layout, self.num_kv_heads, self.num_queries_per_kv, len(query),
                longest,
            )  # fmt: skip
            wanted = max(wanted, tiles)
        elif config.prefill is not None:
            # Queries and outputs are gathered, and outputs are put back token by token.
            wanted = max(wanted, 3 * query.numel() * 2 + _TOKEN_SCRATCH)
        if not wanted:
            return
        torch.empty(wanted, dtype=torch.uint8, device=query.device)

    def _decode_all(self, layer: Any, query: torch.Tensor, metadata: SparseCUDAMetadata, output: torch.Tensor) -> None:
        """Attends with the decoding tokens of a step."""
        cache = self._scaled(self.cache, layer)
        for decode in metadata.decode:
            batch = self._batch_of(layer, query, decode)
            if decode.coverage is not None and self.plan.page_selection is not None:
                counters = None if self.plan.routing else self.plan.counters
                batch = count_rows(batch, cache, self.plan.page_selection, self.softmax, decode.coverage, counters)
            self._decode(batch, cache, DecodeOutput(output[decode.tokens], counters=self.plan.counters))
            sampled = metadata.sampled
            if sampled is not None and decode.tokens.start <= sampled.token < decode.tokens.stop:
                with dropping(UNMEASURED):
                    self._measure(batch, cache, sampled.token - decode.tokens.start, sampled)

    def _batch_of(self, layer: Any, query: torch.Tensor, requests: DecodeRequests) -> DecodeBatch:
        """Returns the requests with a layer's queries."""
        return DecodeBatch(
            query[requests.tokens], requests.block_table, requests.seq_lens, requests.dense, self.plan.dense_tokens,
            self._query_scale(query, layer), self.plan.max_context, requests.budgets,
        )  # fmt: skip

    def _voting(self, layer: Any, window: ObservationWindow) -> tuple[ObservationWindow, KVCache]:
        scaled = replace(window, query_scale=self._query_scale(window.query, layer))
        return scaled, self._scaled(self.prompt_cache, layer)

    @staticmethod
    def _query_scale(query: torch.Tensor, layer: Any) -> torch.Tensor | None:
        """The layer's scale of queries, for float8 queries."""
        scale: torch.Tensor = layer._q_scale
        return scale if query.dtype.itemsize == 1 else None

    @staticmethod
    def _scaled(cache: KVCache, layer: Any) -> KVCache:
        """A cache with the layer's scales, if it is of one byte."""
        if cache.keys.view.dtype.itemsize > 1:
            return cache
        return replace(cache, key_scale=layer._k_scale, value_scale=layer._v_scale)

    def _prefill(self, layer: Any, query: torch.Tensor, rounds: list[PromptRound], output: torch.Tensor) -> None:
        """Attends with the prompts of a step: `query` and `output` are those of their tokens."""
        assert self.plan.prefill is not None
        cache, query_scale = self._scaled(self.prompt_cache, layer), self._query_scale(query, layer)
        kernels = PromptKernels()
        if query.is_cuda:
            # Other versions of FlashAttention take no pages of one token: the operation's own kernel does.
            by_token = self._attend_kept if self.vllm_flash_attn_version == 3 else None
            kernels = PromptKernels(self._varlen_attention(layer), by_token)
        for part in rounds:
            batch = part.prompts.batch(query[part.tokens], query_scale)
            attend_prompts(self.plan.prefill, part, batch, cache, self.softmax, output[part.tokens], kernels)

    @staticmethod
    def _attend_kept(kept: KeptAttention) -> None:
        """Runs vLLM's FlashAttention 3 over the tokens that are kept, as pages of one token."""

        def by_head(scale: torch.Tensor | None) -> torch.Tensor | None:
            return None if scale is None else scale.expand(len(kept.counts), kept.keys.shape[2])

        fa_utils.flash_attn_varlen_func(
            q=kept.query,
            k=kept.keys,
            v=kept.values,
            out=kept.output,
            cu_seqlens_q=kept.query_start,
            max_seqlen_q=kept.max_query_tokens,
            seqused_k=kept.counts,
            max_seqlen_k=kept.max_seq_tokens,
            softmax_scale=kept.softmax.scale,
            causal=True,
            softcap=kept.softmax.softcap,
            block_table=kept.rows,
            fa_version=3,
            s_aux=kept.softmax.sink_logits,
            q_descale=by_head(kept.query_scale),
            k_descale=by_head(kept.key_scale),
            v_descale=by_head(kept.value_scale),
            # How many pieces a context is cut into would follow from the batch.
            num_splits=1,
        )

    def _varlen_attention(self, layer: Any) -> VarlenAttention:
        """Returns vLLM's FlashAttention over virtual sequences."""

        def attend(sequences: VirtualSequences, output: torch.Tensor, wants_lse: bool) -> torch.Tensor | None:
            shape = len(sequences.lengths), 1
            # Learned sinks differ by head, and a virtual sequence has one set for all: the operation adds them.
            attended = fa_utils.flash_attn_varlen_func(
                q=sequences.queries,
                k=sequences.keys,
                v=sequences.values,
                out=output,
                cu_seqlens_q=sequences.query_rows,
                max_seqlen_q=sequences.max_rows,
                seqused_k=sequences.lengths,
                max_seqlen_k=sequences.max_length,
                softmax_scale=self.scale,
                causal=True,
                softcap=self.logits_soft_cap,
                block_table=sequences.page_table,
                return_softmax_lse=wants_lse,
                fa_version=self.vllm_flash_attn_version,
                q_descale=layer._q_scale.expand(shape) if self.supports_quant_query_input else None,
                k_descale=layer._k_scale.expand(shape),
                v_descale=layer._v_scale.expand(shape),
            )
            return attended[1] if wants_lse else None

        return attend

    def _decode(self, batch: DecodeBatch, cache: KVCache, output: DecodeOutput) -> None:
        """Attends with decoding tokens to what the plan has them read."""
        plan = self.plan
        selection = plan.selection_of(batch)
        if selection is None:
            split_attention(
                batch, cache, self.softmax, routing=plan.routing, stopping=plan.stopping(self.scratch),
                splits=self.splits, output=output,
            )  # fmt: skip
        else:
            sparse_decode(
                batch, cache, self.softmax, selection, routing=plan.routing, rule=plan.stop_rule, output=output
            )

    def warm_up_meter(self, layer: Any, spec: AttentionSpec, longest: int, device: torch.device) -> None:
        """Compiles what measuring needs, on a cache of its own, so that no step waits for it.

        Args:
            layer: vLLM's.
            spec: the layer's specification.
            longest: tokens of the longest context that the engine serves.
            device: where the layer runs.
        """
        with dropping(UNMEASURED), self._on_own_cache(spec, longest, device) as table:
            plan = self.plan
            assert plan.selector is not None
            assert plan.quality is not None
            lengths = torch.full((1,), plan.block_size, dtype=torch.int32, device=device)
            heads = self.num_kv_heads * self.num_queries_per_kv
            itemsize = self.cache.keys.view.dtype.itemsize
            query = torch.zeros(
                1, heads, self.head_size, dtype=torch.bfloat16 if itemsize == 1 else spec.dtype, device=device
            )
            batch = DecodeBatch(query, table[None], lengths)
            most = min(plan.selector.budget_pages, longest // plan.page_size)
            sampled = SampledToken(0, plan.block_size, most, Sample(plan.quality.place, plan.quality.place))
            self._measure(batch, self._scaled(self.cache, layer), 0, sampled)
            # Nobody asked for this token.
            plan.quality.counts.zero_()

    def warm_up_compaction(
        self, layer: Any, spec: AttentionSpec, model: ModelConfig, compaction: StepCompaction, device: torch.device
    ) -> None:
        """Compiles what the compaction of a prompt launches, on a cache of its own, so that no prompt waits for it.

        Args:
            layer: vLLM's.
            spec: the layer's specification.
            model: says what dtype queries have, and how long contexts are.
            compaction: of the layers that share the metadata builder.
            device: where the layer runs.
        """
        with dropping(_COLD, "compaction"), self._on_own_cache(spec, model.max_model_len, device) as table:
            dtype = model.dtype if layer.query_quant is None else torch.float8_e4m3fn
            for tokens, observed in compaction.rehearse(table):
                query = torch.zeros(tokens, layer.num_heads, self.head_size, dtype=dtype, device=device)
                self.observe(layer, query, observed)
                self.compact_ended(layer, observed)

    @contextmanager
    def _on_own_cache(self, spec: AttentionSpec, longest: int, device: torch.device) -> Iterator[torch.Tensor]:
        """Binds a cache of one block, for what an engine compiles when it starts.

        Args:
            spec: the layer's specification.
            longest: tokens of a context, at most.
            device: where the layer runs.

        Yields:
            `[max_blocks]` int32, the block table of a context: every block is the only one there is.
        """
        rows = 1, self.num_kv_heads, spec.num_states, 2 * self.head_size
        self.bind_cache(torch.zeros(rows, dtype=spec.dtype, device=device))
        try:
            yield torch.zeros(-(-longest // self.plan.block_size), dtype=torch.int32, device=device)
        finally:
            self._bound_cache = None

    def _measure(self, batch: DecodeBatch, cache: KVCache, index: int, sampled: SampledToken) -> None:
        """Measures the selection of one token of a batch, if the sample is of this layer.

        Nothing but a rule that stops waits for the device: what the host must know of the token it does.
        """
        plan = self.plan
        if plan.quality is None or plan.selector is None or not plan.quality.measures(sampled.sample):
            return
        if batch.query.is_cuda and torch.cuda.is_current_stream_capturing():
            # A graph would measure again in every step.
            return
        request, position = divmod(index, batch.tokens_per_request)
        this = slice(request, request + 1)
        context_lens = (batch.seq_lens[this] - (batch.tokens_per_request - 1 - position)).long()
        query = batch.query[index : index + 1].unflatten(1, (cache.num_kv_heads, -1))
        # The whole row of the table: kernels that choose pages are compiled for its width.
        token, softmax = QueryTokens(query, batch.block_table[this].long(), context_lens), self.softmax
        pages = self._pages_read(token, batch, cache, index, sampled)
        # The host knows bounds of lengths: a context may be as short as those that are attended whole.
        left_out = (context_lens <= plan.dense_tokens)[:, None]
        if plan.routing is not None:
            left_out = left_out | route_groups(token, cache.keys, plan.routing)
        if batch.query_scale is not None:
            token = replace(token, query=query.float() * batch.query_scale)
        selection = plan.selector.page_selection()
        plan.quality.record(token, sampled.longest, cache, pages, softmax, selection, sampled.masses, left_out)

    def _pages_read(
        self, token: QueryTokens, batch: DecodeBatch, cache: KVCache, index: int, sampled: SampledToken
    ) -> torch.Tensor:
        """Returns the complete pages that one token of a batch reads: `[1, num_kv_heads, k]`, -1 for none."""
        selector, num_pages = self.plan.selector, token.num_pages(self.plan.page_size)
        assert selector is not None
        if batch.scores is not None and batch.budgets is not None:
            # A coverage has decided: of each KV head the best pages, so many.
            assert isinstance(selector, ScoredSelection)
            scores = batch.scores[index : index + 1]
            always = selector.sink_pages, selector.recent_pages
            pages = select_pages(scores, num_pages, sampled.pages, *always)
            slot = torch.arange(pages.shape[2], device=pages.device)
            ranked = best_first(pages, scores, num_pages, *always)
            return torch.where(slot < batch.budgets[index][:, None], ranked, -1)
        selector = selector.model_copy(update={"budget_tokens": sampled.pages * self.plan.page_size})
        query = token.query if token.query.dtype.itemsize > 1 else token.query.to(torch.bfloat16)
        if self.plan.stop_rule is None:
            return selector.select(query, cache.statistics, token.block_table, num_pages)
        scale = self.softmax.scale if batch.query_scale is None else self.softmax.scale * float(batch.query_scale)
        scaled = replace(self.softmax, scale=scale)
        return select_until_stable(selector, self.plan.stop_rule, replace(token, query=query), cache, scaled)[0]
