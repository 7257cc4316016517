"""The parts of a backend that all platforms share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.compaction import (
    CompactionRule,
    ObservationWindow,
    PromptBlocks,
    QueryRing,
    add_votes,
    compact_prompt,
)
from sparse_kernels.hot_pages import HotPool
from sparse_kernels.page_statistics import StatisticsLayout
from sparse_kernels.sparse_decode import sparse_decode
from sparse_kernels.split_attention import split_attention
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.attention.choose import choose_pages
from vllm_sparse_plugin.attention.plan import LayerPlan
from vllm_sparse_plugin.compaction.evictions import StepEvictions
from vllm_sparse_plugin.compaction.manager import CompactSpec, compacted, spread
from vllm_sparse_plugin.compaction.step import Observed, StepCompaction, keep_queries, keeps_queries
from vllm_sparse_plugin.config import ResolvedConfig, resolve
from vllm_sparse_plugin.engine_settings import resolved
from vllm_sparse_plugin.engine_traits import layers_over_everything
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.evictions import Retention
from vllm_sparse_plugin.lossless.drafter import SparseDrafter
from vllm_sparse_plugin.metrics import request_log
from vllm_sparse_plugin.offload.memory import note_free_memory
from vllm_sparse_plugin.offload.pool import allocate_cache
from vllm_sparse_plugin.requests import rows

logger = init_logger(f"vllm.{__name__}")


class SparseBackend:
    """Backend of sparse decode attention. Each platform combines it with vLLM's dense backend."""

    preset: ClassVar[str]
    """The preset of the backend."""
    supports_kv_cache_update_bypass: ClassVar[bool] = False
    """False: a fused operation that writes keys and values would not write their statistics."""

    if TYPE_CHECKING:

        @staticmethod
        def get_name() -> str: ...

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # The builder splits a batch by the query lengths on the host.
        return False

    @classmethod
    def config(cls) -> ResolvedConfig:
        """Returns the settings of the engine that is loading; without an engine, those of the preset."""
        vllm_config = get_current_vllm_config_or_none()
        return resolve(None, cls.preset) if vllm_config is None else resolved(vllm_config, cls.preset)

    @classmethod
    def hook_runner(cls) -> None:
        """Hooks the model runner of this process.

        vLLM asks a backend for its layer class while it builds a model. By then it has imported the runner, and the
        runner has not set up its cache.
        """
        compat.hook_cache_allocation(allocate_cache)
        compat.hook_model_runners(
            _building, specify, rows.note, calls_layers, request_log.finish, rows.preempt, _release_layers
        )

    @classmethod
    def statistics_layout(cls, spec: AttentionSpec) -> StatisticsLayout | None:
        """Returns the layout of the statistics rows in blocks of this spec."""
        return cls.config().statistics_layout(spec.head_size, spec.dtype.itemsize)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Adds the statistics rows and the retention to the spec of a KV block."""
        layout = cls.statistics_layout(spec)
        # With offloading, blocks are in host memory and statistics are not.
        if layout is not None and spec.tokens_per_state == 1 and cls.config().offload is None:
            spec = replace(spec, tokens_per_state=layout.tokens_per_row)
        compaction = cls.config().compaction
        if compaction is None:
            return spec
        return compacted(spec, compaction.retention())


def specify(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Returns `spread(specs)`. vLLM asks every worker for its specifications before one of them has its cache."""
    note_free_memory()
    return spread(specs)


def calls_layers(runner: Any, in_prompt: Callable[[], bool]) -> bool:
    """Returns whether the next step of a model runner must call layers, because it computes a token of a prompt, whose
    query may vote; see `compat.hook_model_runners`."""
    return keeps_queries(runner) and in_prompt()


class ModelSize(NamedTuple):
    """Size of a model."""

    longest_context: int
    """In tokens."""
    num_layers: int
    """Layers that attend to the whole context."""
    requests: int
    """The most requests that run at once."""
    decode_tokens: int
    """The most tokens that they decode in a step, drafts included."""

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> ModelSize:
        """Returns the size of an engine's model; zeros without a model."""
        model = vllm_config.model_config
        if model is None:
            return cls(0, 0, 0, 0)
        layers = layers_over_everything(vllm_config)
        requests = vllm_config.scheduler_config.max_num_seqs
        return cls(model.max_model_len, layers, requests, requests * (1 + vllm_config.num_speculative_tokens))


class SparseImpl:
    """One attention layer. Each platform combines it with vLLM's dense implementation."""

    plan: LayerPlan
    """Set by `bind`."""
    cache: KVCache
    """The layer's cache for decoding tokens."""
    statistics_cache: KVCache | None
    """The layer's cache in pages of its statistics, with the statistics; None without statistics."""
    num_heads: int
    num_kv_heads: int
    num_queries_per_kv: int
    head_size: int
    kv_cache_dtype: str
    sinks: torch.Tensor | None
    scale: float
    logits_soft_cap: float
    alibi_slopes: torch.Tensor | None
    hot: tuple[HotPool, int] | None = None
    """With offloading, the copies of pages in device memory, and the layer's index there; None for no copies."""
    statistics_beside: torch.Tensor | None = None
    """With offloading, `[num_blocks, num_kv_heads, rows, 2 * head_size]`, the statistics of blocks, on the device."""
    _rows_of: int = 0
    """With statistics beside, the address of the layer's cache."""
    splits: int = 1
    """The most pieces of a context in attention over all pages."""
    scratch: torch.Tensor | None = None
    """See `Stopping.scratch`; None unless every page may be read."""
    _ring: tuple[QueryRing, int] | None = None
    """Where the layer keeps its queries, and its index there; None if they need not be kept."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_size = ModelSize.of(get_current_vllm_config())
        if self.alibi_slopes is not None:
            raise ConfigurationError("model: got ALiBi position biases, allowed: models with rotary positions")
        self.bound_cache: torch.Tensor | None = None
        """The cache of which the layer has views."""

    def keep_queries(self, ring: QueryRing, index: int) -> None:
        """Has each step write its queries to layer `index` of a ring."""
        self._ring = ring, index

    def keep_copies(self, copies: HotPool, index: int) -> None:
        """Has the layer read the copies of pages of layer `index` of a pool."""
        self.hot = copies, index

    def bind(self, plan: LayerPlan) -> None:
        """Sets the plan that the metadata builder has made for the layer."""
        self.plan = plan
        self.drop_views()

    def drop_views(self) -> None:
        """Drops the views of the layer's cache. They hold memory that vLLM frees: the cache of its graphs' profile."""
        self.bound_cache = None
        for name in ("token_rows", "cache", "statistics_cache"):
            vars(self).pop(name, None)

    def release(self) -> None:
        """Drops the memory of an engine that ends, because its model may live longer."""
        self.drop_views()
        for name in ("hot", "statistics_beside", "_ring", "staging", "scratch"):
            vars(self).pop(name, None)

    def bind_cache(self, kv_cache: torch.Tensor) -> None:
        """Makes the views of the layer's cache if the cache is new: making them costs as much as a kernel."""
        if self.bound_cache is not kv_cache:
            self._make_views(kv_cache)
            self.bound_cache = kv_cache

    def _make_views(self, kv_cache: torch.Tensor) -> None:
        raise NotImplementedError

    def _make_caches(self, kv_cache: torch.Tensor, in_pages: Callable[[int], KVCache]) -> None:
        """Makes the page views of the layer's cache. Statistics follow the token rows of a block.

        Args:
            kv_cache: the layer's cache.
            in_pages: returns keys and values in pages of the given number of tokens.
        """
        plan, self.statistics_cache = self.plan, None
        if plan.statistics is not None:
            rows = self._rows_beside(kv_cache) if plan.offloads else kv_cache[:, :, plan.block_size :]
            views = plan.statistics.views(rows, plan.block_size)
            self.statistics_cache = replace(in_pages(plan.statistics.page_size), statistics=views)
        # Statistics for prefill alone must not change which pages a decoding token reads.
        summarised = self.statistics_cache if plan.scores_pages else None
        self.cache = in_pages(plan.page_size) if summarised is None else summarised
        if self.hot is not None and plan.host_reads is not None:
            pool, layer = self.hot
            self.cache = replace(self.cache, hot=pool.of_layer(layer, plan.host_reads))

    def _rows_beside(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """Returns the statistics rows of a cache that has none in its blocks; the same rows for the same cache."""
        assert self.plan.statistics is not None
        address, kept = kv_cache.data_ptr(), self.statistics_beside
        if kept is None or self._rows_of != address or len(kept) != len(kv_cache):
            blocks, heads, block_size, elements = kv_cache.shape
            rows = self.plan.statistics.rows(block_size)
            kept = kv_cache.new_zeros(blocks, heads, rows, elements)
            self.statistics_beside, self._rows_of = kept, address
        return kept

    def attend_decoding(
        self, batch: DecodeBatch, cache: KVCache, output: DecodeOutput, wants_pages: bool
    ) -> torch.Tensor | None:
        """Attends with decoding tokens as the plan says.

        Returns:
            The chosen pages if `wants_pages`, for other layers or later steps, see `DecodeOutput.pages`.
        """
        plan = self.plan
        selection = plan.selection_of(batch)
        if plan.selects_in_torch and batch.pages is None:
            assert plan.selector is not None
            batch = replace(batch, pages=choose_pages(plan.selector, batch, cache, plan.stop_rule is not None))
        elif wants_pages:
            assert selection is not None
            room = batch.num_tokens, cache.num_kv_heads, selection.k
            output = replace(output, pages=batch.query.new_empty(room, dtype=torch.int32))
        if batch.pages is not None:
            selection = PageSelection(batch.pages.shape[2])
        if selection is None:
            split_attention(
                batch, cache, self.softmax, routing=plan.routing, stopping=plan.stopping(self.scratch),
                splits=self.splits, output=output,
            )  # fmt: skip
        else:
            sparse_decode(
                batch, cache, self.softmax, selection, routing=plan.routing, rule=plan.stop_rule, output=output
            )
        return (batch.pages if output.pages is None else output.pages) if wants_pages else None

    def observe(self, layer: Any, query: torch.Tensor, observed: Sequence[Observed]) -> None:
        """Keeps the queries of observation windows. For a rule that counts every query, adds up the votes.

        Args:
            layer: vLLM's layer.
            query: `[num_tokens, num_heads, head_size]`, the queries of the step.
            observed: the chunks of prompts that vote.
        """
        for chunk in observed:
            if chunk.block_table is None:
                chunk.keep(layer.layer_name, query)
                continue
            window, cache = self._voting(layer, ObservationWindow(query[chunk.tokens], chunk.first_position))
            votes = chunk.votes(layer.layer_name, cache.num_kv_heads)
            add_votes(votes, window, chunk.block_table, cache, self.softmax, chunk.request.voting)

    def run_step(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        observed: Sequence[Observed],
        attend: Callable[[], None],
    ) -> None:
        """Runs one step: keeps queries or votes, attends, and compacts the prompts that end.

        Args:
            layer: vLLM's layer.
            query: `[num_tokens, num_heads, head_size]`.
            kv_cache: the cache in vLLM's layout.
            observed: the chunks of prompts that vote.
            attend: attends with all tokens of the step.
        """
        self.bind_cache(kv_cache)
        if self._ring is not None:
            ring, index = self._ring
            ring.write(index, query)
        self.observe(layer, query, observed)
        attend()
        self.compact_ended(layer, observed)

    def compact_ended(self, layer: Any, observed: Sequence[Observed]) -> None:
        """Compacts the prompts that end in this step.

        It runs after attention. On a GPU the host is ahead by then, and decoding requests do not wait for its launches.
        """
        for chunk in observed:
            if chunk.ends is not None:
                chunk.request.move(layer.layer_name, layer, self, chunk.ends, chunk.rule)

    def compact(
        self,
        layer: Any,
        window: ObservationWindow,
        prompt: PromptBlocks,
        rule: CompactionRule,
        earlier: torch.Tensor | None,
    ) -> None:
        """Moves the kept tokens of a prompt; for the arguments see `compact_prompt`."""
        window, cache = self._voting(layer, window)
        compact_prompt(window, prompt, cache, self.softmax, rule, earlier)

    def held_cache(self, layer: Any) -> KVCache:
        """Returns the cache of decoding tokens, with statistics and the layer's scales."""
        return self._voting(layer, ObservationWindow(torch.empty(0), 0))[1]

    def _voting(self, layer: Any, window: ObservationWindow) -> tuple[ObservationWindow, KVCache]:
        """Returns queries and cache with the layer's scales."""
        return window, self.prompt_cache

    @property
    def prompt_cache(self) -> KVCache:
        """The cache for sparse prefill: with statistics if the layer has them."""
        return self.statistics_cache or self.cache

    @property
    def softmax(self) -> Softmax:
        """How logits become weights. Each call reads the model's learned sinks, because weights may be reloaded."""
        sink_logits = self.sinks
        return Softmax(self.scale, self.logits_soft_cap, None if sink_logits is None else sink_logits.detach())


@contextmanager
def _building(runner: Any) -> Iterator[None]:
    """Gives the model runner to the metadata builders and drafters that it builds.

    vLLM's metadata of a step has neither request names nor prompt lengths.
    """
    drafter = getattr(runner, "drafter", None)
    if isinstance(drafter, SparseDrafter):
        drafter.attach(runner)
    with rows.building(runner):
        yield


def _release_layers(runner: Any) -> None:
    """Releases the memory of the layers of a model runner."""
    for layer in runner.compilation_config.static_forward_context.values():
        if isinstance(impl := getattr(layer, "impl", None), SparseImpl):
            impl.release()


def retention_of(spec: AttentionSpec) -> Retention | None:
    """Returns the retention of a cache spec; None if it keeps every token."""
    return spec.retention if isinstance(spec, CompactSpec) else None


def plan_compaction(
    layers: Mapping[str, Attention],
    config: ResolvedConfig,
    spec: AttentionSpec,
    vllm_config: VllmConfig,
    device: torch.device,
) -> StepCompaction | None:
    """Returns an object that condenses the block tables of a group of layers.

    Args:
        layers: the layers by name.
        config: the settings of the plugin.
        spec: the layers' spec, as the metadata builder gets it.
        vllm_config: vLLM's configuration.
        device: the device of the layers.

    Returns:
        None if the layers keep every token. None also with rolling positions: there each token finds its own window in
        the whole block table.

    Raises:
        ConfigurationError: if the block sizes of attention and scheduler differ, or layers that evict together.
    """
    if not isinstance(spec, CompactSpec) or config.compaction is None or config.rolling_window is not None:
        return None
    scheduled = vllm_config.cache_config.block_size
    if spec.block_size != scheduled:
        raise ConfigurationError(
            f"block_size: got {scheduled}, allowed with compaction: the block size of attention, {spec.block_size}"
        )
    running = vllm_config.scheduler_config.max_num_seqs
    most = max(running, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
    retention, rule, current = spec.retention, config.compaction.rule(), rows.current()
    if not config.compaction.evicts_between_steps:
        if rule is not None:
            rule = replace(rule, in_order_of_votes=config.reads_by_votes)
            if (runner := rows.loading_runner()) is not None:
                keep_queries(runner)
        return StepCompaction(retention, rule, layers, spec.block_size, most, current, device)
    assert rule is not None
    if len({(layer.num_heads, layer.num_kv_heads, layer.head_size) for layer in layers.values()}) > 1:
        raise ConfigurationError(
            "model: got layers of unlike shapes, allowed with compaction between steps: layers of one shape"
        )
    layer = next(iter(layers.values()))
    return StepEvictions(
        retention, rule, layers, spec.block_size, most, current, device,
        query_dtype=vllm_config.model_config.dtype if layer.query_quant is None else torch.float8_e4m3fn,
        max_tokens=max(vllm_config.scheduler_config.max_num_batched_tokens, most),
        slots=running,
    )  # fmt: skip


def report_memory(
    name: str, vllm_config: VllmConfig, spec: AttentionSpec, layout: StatisticsLayout, num_layers: int
) -> None:
    """Logs the memory of the statistics of a group of layers."""
    rows = layout.rows(spec.block_size)
    if spec.tokens_per_state == 1:
        # With offloading, the pool states its memory.
        return
    blocks = vllm_config.cache_config.num_gpu_blocks or 1
    total = spec.page_size_bytes * blocks * num_layers
    share = rows / (spec.block_size + rows)
    logger.info(
        "%s: page statistics (%s, %s, pages of %d tokens) take %.1f MiB of %.1f MiB of KV cache, "
        "%.2f %% on top of keys and values",
        name,
        layout.kind.name,
        layout.format,
        layout.page_size,
        total * share / 2**20,
        total / 2**20,
        100 * layout.memory_overhead,
    )
