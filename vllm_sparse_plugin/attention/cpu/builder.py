"""Splits each step into tokens that attend sparsely and tokens that attend densely."""

from __future__ import annotations

from dataclasses import fields

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_plugin.attention import packing
from vllm_sparse_plugin.attention.base import SparseBackend, plan_compaction, report_memory, retention_of
from vllm_sparse_plugin.attention.cpu.metadata import (
    DecodeTokens,
    DenseTokens,
    PromptTokens,
    RollingTokens,
    SparseCPUMetadata,
    prompts_of,
    subset,
)
from vllm_sparse_plugin.attention.plan import plan_layers
from vllm_sparse_plugin.attention.prefill import PromptRound, plan_rounds, reads_less
from vllm_sparse_plugin.attention.step_log import StepLog
from vllm_sparse_plugin.policies.dense import EveryPage
from vllm_sparse_plugin.requests import rows
from vllm_sparse_plugin.requests.arguments import EVERY_PAGE
from vllm_sparse_plugin.requests.limits import requested_pages


class SparseCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Splits each step into tokens that attend sparsely and tokens that attend densely."""

    isa: str

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        backend: type[SparseBackend] = next(iter(layers.values())).attn_backend
        self.sparse = backend.config()
        self.page_size = (self.sparse.selector or EveryPage()).page_size
        self.isa = packing.supported_isa(self.isa)
        self._set_isa_to_layers(layer_names)
        statistics = backend.statistics_layout(kv_cache_spec)
        self.summarised_tokens = statistics.page_size if statistics else self.page_size
        if self.sparse.runs_kernels:
            for page_size in {self.page_size, self.summarised_tokens}:
                packing.check_packing(self.isa, self.block_size, self.head_dim, page_size, self.dtype)
        self.rows = rows.current_if_any()
        # The rows of drafting steps in lossless mode are not those of the runner.
        self.takes_budgets = self.sparse.is_sparse and self.sparse.lossless is None
        self.draft_rule = self.sparse.draft_rule
        self.chosen: DecodeTokens | None = None
        """The newest step of a draft that chose pages."""
        self.log = StepLog(self.sparse, vllm_config)
        self.compaction = plan_compaction(layers, self.sparse, kv_cache_spec, vllm_config, device)
        group = plan_layers(
            layers, self.sparse, vllm_config, self.block_size, statistics, device, retention_of(kv_cache_spec)
        )
        self.counts = group.counts
        self.reads = group.reads
        plans = group.plans.values()
        self.routes = any(plan.routing is not None for plan in plans)
        self.attends_sparsely = {(plan.is_sparse, plan.prefill is not None) for plan in plans}
        self.prefill_rule, self.group_sizes = group.prefill_rule, group.group_sizes
        self.window = self.sparse.rolling_window
        for name, layer in layers.items():
            layer.impl.bind(group.plans[name], self.isa)
        impls = [layer.impl for layer in layers.values() if layer.impl.plan.needs_cache_views]
        for impl in {(impl.num_heads, impl.plan.is_sparse): impl for impl in impls}.values():
            impl.warm_up(self.kv_cache_spec)
        if statistics is not None:
            report_memory(backend.get_name(), vllm_config, self.kv_cache_spec, statistics, len(layers))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseCPUMetadata:
        return self._build(common_prefix_len, common_attn_metadata, fast_build, self.sparse.lossless is None)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> SparseCPUMetadata:
        metadata = self._build(0, common_attn_metadata, fast_build=True, selects=True)
        decode, rule = metadata.decode, self.draft_rule
        if decode is not None and rule is not None and rule.keeps_pages:
            if rule.chooses_pages(draft_index):
                decode.keeps_pages, self.chosen = True, decode
            else:
                decode.chosen_before = self.chosen
        return metadata

    def _build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool, selects: bool
    ) -> SparseCPUMetadata:
        """Builds the metadata of a step; decoding tokens may attend sparsely if `selects`."""
        if self.compaction is not None:
            common = self.compaction.condense(common)
        dense = super().build(common_prefix_len, common, fast_build)
        metadata = SparseCPUMetadata(**{field.name: getattr(dense, field.name) for field in fields(dense)})

        budgets = self._budgets(common)
        if self.reads is not None and selects:
            self.reads.step(
                common, self.reorder_batch_threshold, None if budgets is None else budgets.numpy(),
                self.log.of(common), None if self.compaction is None else self.compaction.left_out,
            )  # fmt: skip
        if not self.sparse.runs_kernels:
            return metadata
        if self.compaction is not None:
            metadata.observed = self.compaction.observed
        for counts in self.counts:
            counts.step()

        page_size = self.summarised_tokens
        slots = common.slot_mapping[: common.num_actual_tokens]
        filled = slots[(slots >= 0) & (slots % page_size == page_size - 1)]
        if len(filled):
            metadata.filled = filled // self.block_size, filled % self.block_size // page_size

        query_lens = common.query_start_loc[1:] - common.query_start_loc[:-1]
        request_of_token = torch.repeat_interleave(query_lens)
        decoding = self._sparse_requests(common, query_lens, budgets)
        prefilling = self._sparse_prompts(common, query_lens)
        decoding &= selects
        # How many leading tokens of a sparse request attend densely: drafts after them lengthen only later contexts.
        short = torch.zeros_like(query_lens)
        if decoding.any():
            tokens = decoding[request_of_token].nonzero().squeeze(1)
            request = request_of_token[tokens]
            from_end = common.query_start_loc[1:][request] - 1 - tokens
            context_lens = (common.seq_lens[request] - from_end).int()
            sparse = self._reads_less(context_lens, None if budgets is None else budgets[request])
            short += torch.bincount(request[~sparse], minlength=len(short))
            tokens, request, context_lens = tokens[sparse], request[sparse], context_lens[sparse]
            of_tokens = None if budgets is None else self._clamped(budgets[request], context_lens)
            block_table = common.block_table_tensor[request].int()
            metadata.decode = DecodeTokens(tokens, block_table, context_lens, of_tokens)
        if prefilling.any():
            tokens = prefilling[request_of_token].nonzero().squeeze(1)
            metadata.prompts = PromptTokens(tokens, self._round(subset(common, prefilling, query_lens, tokens)))
        for decodes, prefills in self.attends_sparsely:
            dense_lens, sparsely = query_lens, torch.zeros_like(decoding)
            if decodes:
                sparsely |= decoding
                dense_lens = torch.where(decoding, short, dense_lens)
            if prefills:
                sparsely |= prefilling
                dense_lens = dense_lens.masked_fill(prefilling, 0)
            if not sparsely.any():
                continue
            metadata.rest[decodes, prefills] = self._rest(common_prefix_len, common, fast_build, dense_lens)
        if self.window is not None:
            rolling = (query_lens > 0) & self.window.leaves_out(common.seq_lens - 1)
            if rolling.any():
                tokens = rolling[request_of_token].nonzero().squeeze(1)
                prompts = prompts_of(subset(common, rolling, query_lens, tokens))
                rest = self._rest(common_prefix_len, common, fast_build, query_lens.masked_fill(rolling, 0))
                metadata.rolling = RollingTokens(tokens, prompts, rest)
        return metadata

    def _rest(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool, dense_lens: torch.Tensor
    ) -> DenseTokens | None:
        """Returns tokens and metadata of the leading `dense_lens` tokens of each request, `[num_reqs]` integer; None if
        there are none."""
        request = torch.repeat_interleave(common.query_start_loc[1:] - common.query_start_loc[:-1])
        position = torch.arange(len(request)) - common.query_start_loc[request]
        tokens = (position < dense_lens[request]).nonzero().squeeze(1)
        if not len(tokens):
            return None
        rest = subset(common, dense_lens > 0, dense_lens, tokens)
        return DenseTokens(tokens, super().build(common_prefix_len, rest, fast_build))

    def _round(self, common: CommonAttentionMetadata) -> PromptRound:
        """Makes one round of all prompts. The reference needs no bound: it runs one tile or one request at a time."""
        assert self.prefill_rule is not None
        prompts = prompts_of(common)
        (prompt_round,) = plan_rounds(prompts, self.prefill_rule, self.group_sizes, [(0, len(prompts))])
        return prompt_round

    def _sparse_prompts(self, common: CommonAttentionMetadata, query_lens: torch.Tensor) -> torch.Tensor:
        """Returns the prompts that may attend sparsely, `[num_reqs]` bool."""
        assert self.reorder_batch_threshold is not None
        sparse = query_lens > self.reorder_batch_threshold
        rule = self.prefill_rule
        if rule is None:
            return torch.zeros_like(sparse)
        return sparse & torch.tensor([reads_less(rule, length) for length in common.seq_lens.tolist()])

    def _budgets(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Returns the pages that each request reads in a decode step, `[num_reqs]` int64; None if all follow the
        settings."""
        requested = requested_pages(self.rows, common) if self.takes_budgets else []
        if not requested:
            return None
        default = self.sparse.selector.budget_pages if self.sparse.selector else 0
        # Padding rows have no request.
        requested += [None] * (common.num_reqs - len(requested))
        return torch.tensor([default if each is None else each for each in requested])

    def _clamped(self, budgets: torch.Tensor, context_lens: torch.Tensor) -> torch.Tensor:
        """Returns budgets of tokens as int32, at most what the longest context needs."""
        least = 0 if self.sparse.selector is None else self.sparse.selector.budget_pages
        return budgets.clamp(max=max(least, int(context_lens.max()) // self.page_size)).int()

    def _sparse_requests(
        self, common: CommonAttentionMetadata, query_lens: torch.Tensor, budgets: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the decoding requests that are routed or have a context above their budget, `[num_reqs]` bool."""
        assert self.reorder_batch_threshold is not None
        if not self.sparse.is_sparse:
            return torch.zeros_like(query_lens, dtype=torch.bool)
        sparse = (query_lens > 0) & (query_lens <= self.reorder_batch_threshold)
        sparse &= self._reads_less(common.seq_lens, budgets)
        in_prompt = rows.prompts_of(self.rows, common)
        return sparse if in_prompt is None else sparse & ~in_prompt

    def _reads_less(self, context_lens: torch.Tensor, budgets: torch.Tensor | None) -> torch.Tensor:
        """Returns which contexts are routed or above their budget, `[n]` bool; `budgets` are theirs."""
        sparse = context_lens >= self.sparse.config.min_context_tokens
        if not self.routes and self.sparse.selector is not None:
            sparse &= context_lens // self.page_size > (
                self.sparse.selector.budget_pages if budgets is None else budgets
            )
        if budgets is not None:
            sparse &= budgets < EVERY_PAGE
        return sparse
