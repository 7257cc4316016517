"""Splits each step into requests that decode and requests that prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from sparse_kernels.batch import Prompts
from sparse_kernels.hot_pages import begin_step
from sparse_kernels.split_attention import pieces_of, rows_at_once, splits_for, stop_scratch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata, FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.attention.base import (
    SparseBackend,
    SparseImpl,
    plan_compaction,
    report_memory,
    retention_of,
)
from vllm_sparse_plugin.attention.cuda.metadata import (
    DecodeRequests,
    KeptPages,
    SparseCUDAMetadata,
    first_requests,
    without_first,
)
from vllm_sparse_plugin.attention.cuda.runs import DecodeRun, decode_runs
from vllm_sparse_plugin.attention.cuda.start_up import (
    warm_up_compaction,
    warm_up_evictions,
    warm_up_prompts,
)
from vllm_sparse_plugin.attention.cuda.whole import LayerHeads, WholeList
from vllm_sparse_plugin.attention.plan import LayerPlan, plan_layers
from vllm_sparse_plugin.attention.prefill import plan_rounds, reads_less, round_bounds
from vllm_sparse_plugin.attention.step_log import StepLog
from vllm_sparse_plugin.compaction.evictions import StepEvictions
from vllm_sparse_plugin.config import DraftRule
from vllm_sparse_plugin.engine_settings import resolved
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.offload.staging import PromptLengths, StagedPrompts, Staging, plan_copies, stored_dtype
from vllm_sparse_plugin.requests import rows
from vllm_sparse_plugin.requests.arguments import EVERY_PAGE
from vllm_sparse_plugin.requests.limits import StepBudgets, StepNumbers

_MOST_TOKENS = 65_535
"""Query tokens of a launch: they are a dimension of its grid, whose limit this is."""


class SparseCUDAMetadataBuilder(FlashAttentionMetadataBuilder):
    """Splits each step into requests that decode and requests that prefill."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = False
    offloaded: SparseImpl | None = None
    """With offloading, a layer, which knows the copies of pages of all layers."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        name = compat.chosen_backend(vllm_config, BACKENDS)
        selector = None if name is None else resolved(vllm_config, BACKENDS[name]).selector
        if selector is not None and not selector.has_kernel and not selector.capturable:
            return AttentionCGSupport.NEVER
        return cls._cudagraph_support

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.supports_draft_decode_metadata_update = False
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        backend: type[SparseBackend] = next(iter(layers.values())).attn_backend
        sparse = backend.config()
        statistics = backend.statistics_layout(kv_cache_spec)
        assert self.reorder_batch_threshold is not None
        self.log = StepLog(sparse, vllm_config)
        dense_tokens = sparse.config.min_context_tokens - 1
        # Lossless mode has no sparse prefill, so its verifying steps attend densely everywhere.
        self.answers_sparsely = sparse.lossless is None
        # Over an 8-bit cache FlashAttention rounds weights to 8 bits. Verified tokens must equal those of a step of one
        # token. With such a cache all tokens therefore run the decode kernel.
        self.verifies_at_once = not self.answers_sparsely and kv_cache_spec.dtype.itemsize > 1
        self.rolls = sparse.rolling_window is not None
        self.compaction = plan_compaction(layers, sparse, kv_cache_spec, vllm_config, device)
        # Captured graphs read these tensors.
        max_requests = max(vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        self.dense_requests = StepNumbers(False, max_requests, torch.bool, device)
        self.rows = rows.current_if_any()
        self.budgets = StepBudgets(sparse, self.rows, max_requests, device)
        group = plan_layers(
            layers, sparse, vllm_config, self.block_size, statistics, device, retention_of(kv_cache_spec)
        )
        self.counts = group.counts
        self.reads = group.reads
        max_tokens = max_requests * self.reorder_batch_threshold
        scratch = self._stop_scratch(layers, group.plans, max_tokens)
        self.staging = None
        if sparse.offload is not None:
            self.staging = self._make_staging(layers, kv_cache_spec, vllm_config, device)
            self.offloaded = next(iter(layers.values())).impl
        for name, layer in layers.items():
            splits = splits_for(max_tokens, layer.num_heads, layer.head_size)
            layer.impl.bind(group.plans[name], splits, scratch, self.staging)
        selecting = [layer for name, layer in layers.items() if group.plans[name].reads_selection]
        heads = [
            LayerHeads(each.num_kv_heads, each.num_heads // each.num_kv_heads, each.head_size) for each in selecting
        ]
        longest_query, runner = self.reorder_batch_threshold, rows.loading_runner()
        self.whole = WholeList(heads, longest_query, dense_tokens, device, runner) if heads else None
        prefilling = [layer for name, layer in layers.items() if group.plans[name].prefill is not None]
        for layer in {(layer.num_heads, layer.num_kv_heads, layer.head_size): layer for layer in prefilling}.values():
            warm_up_prompts(layer, kv_cache_spec, vllm_config.model_config, device)
        if self.compaction is not None:
            for layer in {(layer.num_heads, layer.head_size): layer for layer in layers.values()}.values():
                warm_up_compaction(layer, kv_cache_spec, vllm_config.model_config, self.compaction, device)
        if isinstance(self.compaction, StepEvictions):
            longest = vllm_config.model_config.max_model_len
            warm_up_evictions(list(layers.values()), kv_cache_spec, longest, self.compaction, device)
        self.kept_pages = self._room_for_pages(sparse.draft_rule, layers, group.plans)
        self.any_dense_layer = not all(plan.is_sparse for plan in group.plans.values())
        self.any_sparse_layer = any(plan.is_sparse for plan in group.plans.values())
        self.prefill_rule, self.group_sizes = group.prefill_rule, group.group_sizes
        self.any_dense_decode = any(plan.prefill and not plan.is_sparse for plan in group.plans.values())
        if statistics is not None:
            report_memory(backend.get_name(), vllm_config, kv_cache_spec, statistics, len(layers))

    def _room_for_pages(
        self, rule: DraftRule | None, layers: dict[str, Attention], plans: dict[str, LayerPlan]
    ) -> dict[str, torch.Tensor] | None:
        """Returns `KeptPages.of_layers`; None unless steps of drafts read pages of an earlier step."""
        if rule is None or not rule.keeps_pages:
            return None
        room = {}
        for name, plan in plans.items():
            if plan.page_selection is not None and plan.anchor is None:
                width = plan.page_selection.k + rule.next_pages(plan.page_size)
                shape = self.vllm_config.scheduler_config.max_num_seqs, layers[name].num_kv_heads, width
                room[name] = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        return room

    def _stop_scratch(
        self, layers: dict[str, Attention], plans: dict[str, LayerPlan], max_tokens: int
    ) -> torch.Tensor | None:
        """Returns the scratch that layers with stopping over all pages use in turn; None if there are none."""
        # vLLM may pad the rows of a block table.
        context_tokens = self.vllm_config.model_config.max_model_len + 64 * self.block_size
        scratch: torch.Tensor | None = None
        for name, layer in layers.items():
            stopping = plans[name].stopping()
            if stopping is None:
                continue
            pieces, group_size = pieces_of(context_tokens, stopping.rule), layer.num_heads // layer.num_kv_heads
            rows_per_request = self.reorder_batch_threshold * layer.num_kv_heads
            most_rows = rows_at_once(pieces, group_size, layer.head_size, rows_per_request)
            rows = min(max_tokens * layer.num_kv_heads, most_rows)
            wanted = stop_scratch(stopping.rule, rows, context_tokens, self.device)
            scratch = wanted if scratch is None or len(wanted) > len(scratch) else scratch
        return scratch

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseCUDAMetadata:
        return self._build(common_prefix_len, common_attn_metadata, fast_build, self.answers_sparsely)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> SparseCUDAMetadata:
        metadata = self._build(0, common_attn_metadata, fast_build=True, selects=True)
        if self.kept_pages is not None:
            metadata.kept = KeptPages(self.kept_pages, are_read=False)
        return metadata

    def _build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool, selects: bool
    ) -> SparseCUDAMetadata:
        """Builds the metadata of a step; decoding tokens may attend sparsely if `selects`."""
        if self.compaction is not None:
            common = self.compaction.condense(common)
        # The copies exist once vLLM has allocated the cache.
        if self.offloaded is not None and self.offloaded.hot is not None:
            begin_step(self.offloaded.hot[0], common.slot_mapping)
        for counts in self.counts:
            counts.step()
        requested = self.budgets.step(common)
        if self.reads is not None and selects:
            self.reads.step(
                common, self.reorder_batch_threshold, self.budgets.by_request(requested, common.num_reqs),
                self.log.of(common), None if self.compaction is None else self.compaction.left_out,
            )  # fmt: skip
        runs, prompts = self._split(common) if selects else ([], None)
        num_decodes = sum(run.num_requests for run in runs)
        num_decode_tokens = sum(run.num_tokens for run in runs)
        dense_metadata, verifies = None, not selects and self.verifies_at_once and self._verifies(common)
        # With rolling positions, and where drafts are verified, no layer runs FlashAttention.
        if not self.rolls and not verifies and (self.any_dense_layer or not num_decodes):
            dense_metadata = super().build(common_prefix_len, common, fast_build)
            metadata = SparseCUDAMetadata(
                **{item.name: getattr(dense_metadata, item.name) for item in fields(dense_metadata)}
            )
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
            whole_requests = self._write_dense_requests(common, num_decodes, requested)
            dense, budgets = self.dense_requests.tensor, self.budgets.numbers
            if self.whole is not None:
                bound = common.seq_lens_cpu_upper_bound
                self.whole.write(whole_requests, None if bound is None else bound.numpy())
            for run in runs:
                requests = slice(run.first_request, run.first_request + run.num_requests)
                tokens = slice(run.first_token, run.first_token + run.num_tokens)
                metadata.decode.append(
                    DecodeRequests(
                        tokens=tokens,
                        block_table=common.block_table_tensor[requests],
                        seq_lens=common.seq_lens[requests],
                        dense=dense[requests],
                        budgets=None if budgets is None else budgets.tensor[requests],
                        whole=None if self.whole is None else self.whole.of_run(run.first_request),
                    )
                )
        if verifies:
            every = slice(0, common.num_actual_tokens)
            dense_mask = self.dense_requests.tensor[: common.num_reqs]
            metadata.verified = DecodeRequests(every, common.block_table_tensor, common.seq_lens, dense_mask)
        elif num_decodes < common.num_reqs:
            if num_decodes:
                # FlashAttention plans its schedule in one buffer, which may hold that of the whole batch.
                prefills = without_first(common, num_decodes, num_decode_tokens)
                metadata.prefill = super().build(common_prefix_len, prefills, fast_build=True)
            else:
                metadata.prefill = dense_metadata
        parts, rule, group_sizes = [(0, common.num_reqs - num_decodes)], self.prefill_rule, self.group_sizes
        if prompts is not None:
            assert rule is not None
            most_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
            longest = self.vllm_config.model_config.max_model_len
            parts = round_bounds(prompts, rule, group_sizes, most_tokens, longest)
        if self.staging is not None and metadata.prefill is not None:
            others = without_first(common, num_decodes, num_decode_tokens) if num_decodes else common
            metadata.staged = self._stage(self.staging, others, metadata.prefill, parts)
            parts = [part.requests for part in metadata.staged]
        if prompts is not None:
            assert rule is not None
            metadata.rounds = plan_rounds(prompts, rule, group_sizes, parts)
            if num_decodes and self.any_dense_decode:
                decodes = first_requests(common, num_decodes, num_decode_tokens)
                metadata.dense_decode = super().build(common_prefix_len, decodes, fast_build=True)
        return metadata

    def _stage(
        self,
        staging: Staging,
        common: CommonAttentionMetadata,
        metadata: FlashAttentionMetadata,
        rounds: Sequence[tuple[int, int]],
    ) -> list[StagedPrompts]:
        """Returns the requests of a batch in groups whose blocks fit the buffers.

        Args:
            staging: the buffers.
            common: the batch.
            metadata: of the batch.
            rounds: ranges of its requests, see `round_bounds`. A group is within one of them.
        """
        starts, bound = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound
        # Lengths say which blocks the step writes, so more than the longest one must be known.
        contexts = _filled((common.seq_lens.cpu() if bound is None else bound).tolist(), common.num_reqs)
        lengths = PromptLengths(tuple(end - start for start, end in pairwise(starts)), tuple(contexts))
        groups, parts = lengths.groups(staging.block_size, staging.capacity, {first for first, _ in rounds}), []
        for first, end in groups:
            some, tokens = slice(first, end), slice(starts[first], starts[end])
            if tokens.start == tokens.stop:
                continue
            if len(groups) > 1:
                rest = without_first(common, first, starts[first]) if first else common
                one_group = first_requests(rest, end - first, starts[end] - starts[first])
                metadata = super().build(0, one_group, fast_build=True)
            of_group = PromptLengths(lengths.queries[some], lengths.contexts[some])
            blocks = common.block_table_tensor[some]
            table, early, late = plan_copies(of_group, blocks, staging.block_size, staging.capacity)
            staged = replace(metadata, block_table=table)
            parts.append(StagedPrompts(staged, (first, end), tokens, early, late))
        return parts

    def _make_staging(
        self, layers: dict[str, Attention], spec: AttentionSpec, vllm_config: VllmConfig, device: torch.device
    ) -> Staging:
        """Returns buffers for the blocks of the longest context. vLLM allocates its cache afterwards."""
        in_order = sorted(layers.values(), key=lambda layer: extract_layer_index(layer.layer_name))
        capacity = -(-vllm_config.model_config.max_model_len // self.block_size)
        shape = 2, capacity, spec.num_kv_heads, self.block_size, 2 * spec.head_size
        return Staging([layer.impl for layer in in_order], torch.zeros(shape, dtype=stored_dtype(spec), device=device))

    def _split(self, common: CommonAttentionMetadata) -> tuple[list[DecodeRun], Prompts | None]:
        """Returns the requests that decode, and the other requests if some of them attend sparsely.

        If all layers are dense, and no prompt attends sparsely, the list of decoding requests is empty: vLLM runs the
        whole batch.
        """
        rule = self.prefill_rule
        if rule is None and not self.any_sparse_layer:
            return [], None
        runs = self._decode_runs(common)
        first = sum(run.num_requests for run in runs)
        bound = common.seq_lens_cpu_upper_bound
        if rule is None or first == common.num_reqs:
            return runs if self.any_sparse_layer else [], None
        longest = [common.max_seq_len] * common.num_reqs if bound is None else bound.tolist()
        longest = _filled(longest, common.num_reqs)[first:]
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
            # Requests without query tokens may pad the batch of a graph.
            runs = [DecodeRun(0, num_reqs, 0, num_tokens)]
        else:
            start = common.query_start_loc_cpu
            runs = decode_runs((start[1:] - start[:-1]).tolist(), longest)
        return [part for run in runs for part in run.parts(_MOST_TOKENS)]

    def _verifies(self, common: CommonAttentionMetadata) -> bool:
        """Whether all requests have the same number of tokens, above one: the newest token and its drafts."""
        assert self.reorder_batch_threshold is not None
        per_request = common.max_query_len
        is_uniform = common.num_actual_tokens == per_request * common.num_reqs
        return is_uniform and 1 < per_request <= self.reorder_batch_threshold

    def _write_dense_requests(
        self, common: CommonAttentionMetadata, num_decodes: int, asked: Sequence[int | None]
    ) -> NDArray[np.bool_]:
        """Writes and returns which decoding requests attend densely, `[num_decodes]` bool."""
        dense = np.zeros(num_decodes, dtype=bool)
        in_prompt = rows.prompts_of(self.rows, common)
        if in_prompt is not None:
            # The requests that pad the batch of a graph may be missing.
            prefilling = in_prompt.numpy()[:num_decodes]
            dense[: len(prefilling)] |= prefilling
        for request, pages in enumerate(asked[:num_decodes]):
            dense[request] |= pages == EVERY_PAGE
        self.dense_requests.write(dense.tolist() if dense.any() else [])
        return dense


def _filled(lengths: list[int], num_reqs: int) -> list[int]:
    """Returns the lengths of a batch. Those of requests that pad the batch of a graph may be missing, and are 0."""
    return lengths[:num_reqs] + [0] * (num_reqs - len(lengths))
