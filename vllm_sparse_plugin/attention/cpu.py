"""Runs the sparse pipeline inside vLLM's CPU build.

Short contexts, sliding-window layers, leading dense layers and, unless it is sparse, prefill run vLLM's own CPU
attention on the token rows of the cache; decoding tokens of long contexts run route, select and attend, and long
prompts attend to blocks or to the tokens that a layer keeps. Which requests are which is decided once per step by the
metadata builder, from lengths alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from sparse_kernels.batch import Prompts, QueryTokens
from sparse_kernels.cache import KVCache
from sparse_kernels.group_routing import route_groups
from sparse_kernels.page_coverage import Coverage
from sparse_kernels.page_statistics import update_page_statistics
from sparse_kernels.rolling_attention import attend_rolling
from sparse_kernels.sparse_attention import attend_pages
from sparse_kernels.stopping import count_reads
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
from vllm_sparse_plugin.attention.base import SparseBackend, SparseImpl, plan_compaction, report_memory
from vllm_sparse_plugin.attention.metering import Meter
from vllm_sparse_plugin.attention.plan import plan_layers
from vllm_sparse_plugin.attention.prefill import PromptKernels, PromptRound, attend_prompts, plan_rounds, reads_less
from vllm_sparse_plugin.attention.stopping import select_until_stable
from vllm_sparse_plugin.compaction.step import Observed
from vllm_sparse_plugin.metrics.sampling import UNMEASURED, Sample, dropping
from vllm_sparse_plugin.policies.base import PagesRead
from vllm_sparse_plugin.policies.dense import EveryPage, every_page
from vllm_sparse_plugin.policies.scored import ScoredSelection
from vllm_sparse_plugin.requests import rows
from vllm_sparse_plugin.requests.arguments import EVERY_PAGE, pages_of_request

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
    limits: Coverage | None
    """How much each reads, where a request of the step says something of its own or the layers have a coverage."""
    sampled: Sample | None = None
    """Index of the token whose selection is measured, and in which layers; None for none."""
    masses: torch.Tensor | None = None
    """Where the estimated masses of its request are added up; None where nobody asks for them."""


class PromptTokens(NamedTuple):
    """The prompts of a step that attend sparsely."""

    tokens: torch.Tensor
    """`[num_tokens]` int64, positions in the batch."""
    part: PromptRound
    """What they attend to."""


class DenseTokens(NamedTuple):
    """The query tokens of a step that attend densely, in the layers that do so with them."""

    tokens: torch.Tensor
    """`[num_tokens]` int64, positions in the batch."""
    metadata: CPUAttentionMetadata
    """Metadata of the batch that they form."""


class RollingTokens(NamedTuple):
    """The requests of a step whose newest tokens leave out something of their contexts, and see the sinks nearer."""

    tokens: torch.Tensor
    """`[num_tokens]` int64, positions in the batch."""
    prompts: Prompts
    """Where they are, decoding requests included."""
    rest: DenseTokens | None
    """The other requests; None for none."""


@dataclass
class SparseCPUMetadata(CPUAttentionMetadata):
    """vLLM's CPU metadata for the whole batch, and what sparse layers do instead."""

    filled: tuple[torch.Tensor, torch.Tensor] | None = None
    """`[num_filled]` int64 each, blocks and indices within them of the pages that this step completes, if any."""
    decode: DecodeTokens | None = None
    """Tokens that attend sparsely; None if there are none."""
    prompts: PromptTokens | None = None
    """Prompts that attend sparsely; None if there are none."""
    rolling: RollingTokens | None = None
    """Requests that attend with rolling positions, in all layers; None if there are none."""
    observed: list[Observed] = field(default_factory=list)
    """Tokens of prompts whose queries are kept for a vote."""
    rest: dict[tuple[bool, bool], DenseTokens | None] = field(default_factory=dict)
    """What is left of the batch where `decode` and where `prompts` attend sparsely; None for nothing."""


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
        statistics = backend.statistics_layout(kv_cache_spec)
        self.summarised_tokens = statistics.page_size if statistics else self.page_size
        if self.sparse.runs_kernels:
            for page_size in {self.page_size, self.summarised_tokens}:
                packing.check_packing(self.isa, self.block_size, self.head_dim, page_size, self.dtype)
        self.rows = rows.current_if_any()
        assert self.reorder_batch_threshold is not None
        self.meter = Meter(self.sparse, vllm_config, self.reorder_batch_threshold)
        self.compaction = plan_compaction(layers, self.sparse, kv_cache_spec, vllm_config, device)
        group = plan_layers(layers, self.sparse, vllm_config, self.block_size, statistics, device)
        self.counts = group.counts
        self.reads = group.reads
        plans = group.plans.values()
        self.routes = any(plan.routing is not None for plan in plans)
        self.attends_sparsely = {(plan.is_sparse, plan.prefill is not None) for plan in plans}
        self.prefill_rule, self.group_sizes = group.prefill_rule, group.group_sizes
        self.window = self.sparse.rolling_window
        for name, layer in layers.items():
            layer.impl.isa = self.isa
            layer.impl.bind(group.plans[name])
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
        return self._build(0, common_attn_metadata, fast_build=True, selects=True)

    def _build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool, selects: bool
    ) -> SparseCPUMetadata:
        """Builds the metadata of a step; `selects` says whether decoding tokens may attend sparsely in it."""
        if self.compaction is not None:
            common = self.compaction.condense(common)
        whole = super().build(common_prefix_len, common, fast_build)
        metadata = SparseCPUMetadata(**{field.name: getattr(whole, field.name) for field in fields(whole)})

        if not self.sparse.runs_kernels:
            return metadata
        if self.compaction is not None:
            metadata.observed = self.compaction.observed
        for counts in self.counts:
            counts.step()
        limits = self._limits(common)
        if self.reads is not None and selects:
            # What a coverage reads is not known from lengths.
            budgets, covers = None, torch.zeros(0, dtype=torch.bool)
            if limits is not None:
                covers = limits.share > 0
                budgets = torch.where(covers, EVERY_PAGE, limits.most).numpy()
            log = self.meter.log_of(common, covers.numpy())
            self.reads.step(common, self.reorder_batch_threshold, budgets, log)

        page_size = self.summarised_tokens
        slots = common.slot_mapping[: common.num_actual_tokens]
        filled = slots[(slots >= 0) & (slots % page_size == page_size - 1)]
        if len(filled):
            metadata.filled = filled // self.block_size, filled % self.block_size // page_size

        query_lens = common.query_start_loc[1:] - common.query_start_loc[:-1]
        request_of_token = torch.repeat_interleave(query_lens)
        decoding = self._sparse_requests(common, query_lens, limits)
        prefilling = self._sparse_prompts(common, query_lens)
        decoding &= selects
        if decoding.any():
            tokens = decoding[request_of_token].nonzero().squeeze(1)
            request = request_of_token[tokens]
            from_end = common.query_start_loc[1:][request] - 1 - tokens
            context_lens = (common.seq_lens[request] - from_end).long()
            block_table = common.block_table_tensor[request].long()
            own = None if limits is None else limits[request]
            metadata.decode = DecodeTokens(tokens, block_table, context_lens, own)
            if self.meter.sample is not None:
                with dropping(UNMEASURED):
                    self._sample(self.meter.sample, metadata.decode, common, request)
        if prefilling.any():
            tokens = prefilling[request_of_token].nonzero().squeeze(1)
            metadata.prompts = PromptTokens(tokens, self._round(_subset(common, prefilling, query_lens, tokens)))
        for decodes, prefills in self.attends_sparsely:
            sparsely = torch.zeros_like(decoding)
            if decodes:
                sparsely |= decoding
            if prefills:
                sparsely |= prefilling
            if not sparsely.any():
                continue
            metadata.rest[decodes, prefills] = self._rest(common_prefix_len, common, fast_build, ~sparsely)
        if self.window is not None:
            rolling = (query_lens > 0) & self.window.leaves_out(common.seq_lens - 1)
            if rolling.any():
                tokens = rolling[request_of_token].nonzero().squeeze(1)
                prompts = _prompts_of(_subset(common, rolling, query_lens, tokens))
                rest = self._rest(common_prefix_len, common, fast_build, ~rolling)
                metadata.rolling = RollingTokens(tokens, prompts, rest)
        return metadata

    def _sample(
        self, sample: Sample, decode: DecodeTokens, common: CommonAttentionMetadata, request: torch.Tensor
    ) -> None:
        """Notes the token that a sample is of: one that leaves something out, if there is any.

        Args:
            sample: what is measured of the step.
            decode: the tokens that attend sparsely.
            common: the step.
            request: `[num_tokens]` int64, the request of each of them.
        """
        assert self.sparse.selector is not None
        least = self.sparse.selector.pages_read.least if decode.limits is None else decode.limits.least
        # Where groups are routed, tokens within their budget are here too.
        candidates = (decode.context_lens // self.page_size > least).nonzero().squeeze(1).tolist()
        if candidates:
            token = candidates[sample.token % len(candidates)]
            decode.masses = self.meter.masses_of(common, int(request[token]))
            decode.sampled = sample._replace(token=token)

    def _rest(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool, requests: torch.Tensor
    ) -> DenseTokens | None:
        """Makes a batch of some of the requests, `[num_reqs]` bool, that attend densely; None if without tokens."""
        query_lens = common.query_start_loc[1:] - common.query_start_loc[:-1]
        tokens = requests[torch.repeat_interleave(query_lens)].nonzero().squeeze(1)
        if not len(tokens):
            return None
        subset = _subset(common, requests, query_lens, tokens)
        return DenseTokens(tokens, super().build(common_prefix_len, subset, fast_build))

    def _round(self, common: CommonAttentionMetadata) -> PromptRound:
        """Makes one round of all prompts: the reference takes one tile, or one request, after the other."""
        assert self.prefill_rule is not None
        prompts = _prompts_of(common)
        most_tokens = len(prompts) * max(prompts.longest)
        (whole,) = plan_rounds(prompts, self.prefill_rule, self.group_sizes, most_tokens)
        return whole

    def _sparse_prompts(self, common: CommonAttentionMetadata, query_lens: torch.Tensor) -> torch.Tensor:
        """Finds prompts that may leave out something of their context: `[num_reqs]` bool."""
        assert self.reorder_batch_threshold is not None
        sparse = query_lens > self.reorder_batch_threshold
        rule = self.prefill_rule
        if rule is None:
            return torch.zeros_like(sparse)
        return sparse & torch.tensor([reads_less(rule, length) for length in common.seq_lens.tolist()])

    def _limits(self, common: CommonAttentionMetadata) -> Coverage | None:
        """Returns how much each request reads in a decode step; None if all have the layers' budget."""
        if not self.sparse.is_sparse:
            return None
        # Lossless mode takes none, and its drafting steps have rows of their own.
        arguments = self.rows.arguments(common) if self.rows is not None and self.sparse.lossless is None else []
        own = [pages_of_request(each, self.sparse) for each in arguments]
        usual = self.sparse.selector.pages_read if self.sparse.selector else PagesRead(0, 0)
        if not any(own) and not usual.share:
            return None
        # Rows that pad a batch belong to nobody.
        own += [None] * (common.num_reqs - len(own))
        return _limits_of([pages or usual for pages in own])

    def _sparse_requests(
        self, common: CommonAttentionMetadata, query_lens: torch.Tensor, limits: Coverage | None
    ) -> torch.Tensor:
        """Finds decoding requests that are routed, or whose context exceeds their budget: `[num_reqs]` bool."""
        assert self.reorder_batch_threshold is not None
        if not self.sparse.is_sparse:
            return torch.zeros_like(query_lens, dtype=torch.bool)
        sparse = (query_lens > 0) & (query_lens <= self.reorder_batch_threshold)
        if not self.routes and self.sparse.selector is not None:
            usual = self.sparse.selector.budget_pages
            sparse &= common.seq_lens // self.page_size > (usual if limits is None else limits.least)
        if limits is not None:
            sparse &= limits.least < EVERY_PAGE
        sparse &= common.seq_lens >= self.sparse.config.min_context_tokens
        if common.is_prefilling is not None:
            sparse &= ~common.is_prefilling
        return sparse


def _prompts_of(common: CommonAttentionMetadata) -> Prompts:
    """Returns where the tokens of a batch lie."""
    start, lengths = common.query_start_loc.int(), common.seq_lens.int()
    query_lens = tuple((start[1:] - start[:-1]).tolist())
    return Prompts(start, common.block_table_tensor.int(), lengths, query_lens, tuple(lengths.tolist()))


def _limits_of(pages: Sequence[PagesRead]) -> Coverage:
    """Returns how much each of some requests or tokens reads."""
    least, most, share = zip(*pages, strict=True)
    return Coverage(torch.tensor(share, dtype=torch.float32), torch.tensor(least), torch.tensor(most))


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
        self._update_statistics((first, first))
        if self.plan.is_sparse:
            grouped = torch.zeros(1, self.num_kv_heads, self.num_queries_per_kv, self.head_size, dtype=spec.dtype)
            # A page may be as large as a block; what comes after it is in the next one.
            token = QueryTokens(grouped, torch.arange(2).unsqueeze(0), first + self.plan.page_size + 1)
            usual = self.plan.selector.pages_read if self.plan.selector is not None else None
            limits = _limits_of([usual]) if usual is not None and usual.share else None
            self._attend(token, self.cache, self.all_heads, limits)
            if self.plan.routing is not None:
                route_groups(token, self.cache.keys, self.plan.routing)
        if self.plan.counters is not None:
            # Nobody asked for this token.
            self.plan.counters.zero_()
        self._bound_cache = None

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
        """Writes the statistics of pages, by blocks and indices within them, if the layer keeps any."""
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
        """Attends with all tokens of a step; arguments are those of `forward`."""

        def dense(query: torch.Tensor, metadata: CPUAttentionMetadata, output: torch.Tensor) -> torch.Tensor:
            return super(SparseCPUImpl, self).forward(
                layer, query, key, value, self.token_rows, metadata, output, *output_scales
            )

        # A layer that shares the cache of another finds the statistics there.
        if attn_metadata.filled and self.kv_sharing_target_layer_name is None:
            self._update_statistics(attn_metadata.filled)
        if attn_metadata.rolling is not None:
            rolling = attn_metadata.rolling
            if (whole := rolling.rest) is not None:
                output[whole.tokens] = dense(query[whole.tokens], whole.metadata, torch.empty_like(query[whole.tokens]))
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
            output[decode.tokens] = self._decode(query[decode.tokens], decode)
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

    def _decode(self, query: torch.Tensor, decode: DecodeTokens) -> torch.Tensor:
        """Routes, selects and attends; takes and returns `[num_tokens, num_heads, head_size]`."""
        grouped = query.unflatten(1, (self.num_kv_heads, self.num_queries_per_kv))
        tokens = QueryTokens(grouped, decode.block_table, decode.context_lens)
        routing = self.plan.routing
        skipped = None if routing is None else route_groups(tokens, self.cache.keys, routing)
        if decode.sampled is not None:
            with dropping(UNMEASURED):
                self._measure(tokens, decode, skipped)
        if routing is None or skipped is None:
            return self._attend(tokens, self.cache, self.all_heads, decode.limits)
        if routing.counts is not None:
            asked = torch.full((self.num_kv_heads,), len(query))
            routing.counts.add_(torch.stack([skipped.sum(dim=0), asked], dim=1))
        # The groups that are left form a batch of their own, each a token of a cache of one KV head.
        token, head = (~skipped).nonzero(as_tuple=True)
        blocks = tokens.block_table[token] * self.num_kv_heads + head[:, None]
        active = QueryTokens(grouped[token, head].unsqueeze(1), blocks, tokens.context_lens[token])
        output = torch.zeros_like(grouped)
        limits = None if decode.limits is None else decode.limits[token]
        output[token, head] = self._attend(active, self.cache_by_head, head[:, None], limits)
        return output.flatten(1, 2)

    def _attend(
        self, tokens: QueryTokens, cache: KVCache, heads: torch.Tensor, limits: Coverage | None
    ) -> torch.Tensor:
        """Attends with tokens to the pages that the layer reads.

        Args:
            tokens: the query tokens.
            cache: what they attend to.
            heads: `[num_tokens or 1, num_kv_heads]` int64, which KV heads of the layer those of the cache are.
            limits: see `DecodeTokens`.
        """
        pages, reads = self._pages(tokens, cache, limits)
        if reads is not None and self.plan.counters is not None:
            self.plan.counters.index_add_(0, heads.expand(reads.shape[:2]).flatten(), reads.flatten(0, 1))
        return attend_pages(tokens, cache, pages, self.softmax)

    def _pages(
        self, tokens: QueryTokens, cache: KVCache, limits: Coverage | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the pages that the layer reads and, where lengths do not tell how many those are, what `count_reads`
        says of them."""
        plan, num_pages = self.plan, tokens.num_pages(cache.page_size)
        if plan.selector is None:
            return every_page(num_pages, cache.num_kv_heads), None
        if limits is not None and limits.share.any():
            assert isinstance(plan.selector, ScoredSelection)
            pages, counts = plan.selector.select_covering(tokens, cache, self.softmax, limits)
            return pages, count_reads(counts, tokens.context_lens, cache.page_size, cache.page_size)
        if plan.stop_rule is None:
            budgets = None if limits is None else limits.most
            return plan.selector.select(tokens.query, cache.statistics, tokens.block_table, num_pages, budgets), None
        return select_until_stable(plan.selector, plan.stop_rule, tokens, cache, self.softmax)

    def _measure(self, tokens: QueryTokens, decode: DecodeTokens, skipped: torch.Tensor | None) -> None:
        """Measures the selection of one of the tokens, of the groups that are not skipped, if the sample is of this
        layer; `skipped` is `[num_tokens, num_kv_heads]` bool."""
        plan, sample = self.plan, decode.sampled
        if plan.quality is None or plan.selector is None or sample is None or not plan.quality.measures(sample):
            return
        one = slice(sample.token, sample.token + 1)
        token = tokens[one]
        pages, _ = self._pages(token, self.cache, None if decode.limits is None else decode.limits[one])
        plan.quality.record(
            token, int(token.context_lens), self.cache, pages, self.softmax, plan.selector.page_selection(),
            decode.masses, None if skipped is None else skipped[one],
        )  # fmt: skip
