"""Plans each attention layer once, when an engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from sparse_kernels.batch import DecodeBatch, PageSelection
from sparse_kernels.block_prefill import COUNTERS
from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.page_statistics import StatisticsLayout
from sparse_kernels.split_attention import Stopping
from sparse_kernels.stopping import StopRule
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_sparse_plugin.admission import attends_whole_context, drafts_with_attention
from vllm_sparse_plugin.attention.anchors import anchors_of, expect_selecting, heads_of_anchors
from vllm_sparse_plugin.attention.prefill import PrefillPlan, PromptRule
from vllm_sparse_plugin.attention.rolling import RollingPlan, plan_rolling
from vllm_sparse_plugin.config import KEY, ResolvedConfig
from vllm_sparse_plugin.config.account import keys_of_layer
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.evictions import Retention
from vllm_sparse_plugin.metrics.live import (
    BLOCK_READS,
    READS,
    SKIPPED,
    TOKEN_READS,
    ContextReads,
    DeviceCounts,
    host_reads,
)
from vllm_sparse_plugin.policies import EveryPage, Selection, reads_selection
from vllm_sparse_plugin.policies.scored import ScoredSelection
from vllm_sparse_plugin.requests.arguments import most_pages_on_gpu


@dataclass(frozen=True)
class LayerPlan:
    """How one attention layer attends in decode and prefill."""

    block_size: int
    """Tokens of a cache block."""
    page_size: int
    """Tokens of a page in decode steps."""
    dense_tokens: int
    """Contexts of up to this many tokens attend densely."""
    max_context: int | None = None
    """Tokens of the longest context that the engine serves; None if unknown."""
    statistics: StatisticsLayout | None = None
    """Layout of the layer's statistics; None without statistics."""
    selector: Selection | None = None
    """The policy that chooses pages; None if decoding tokens read every page."""
    anchor: str | None = None
    """The layer whose pages this layer reads; None if it chooses its own pages or reads every page."""
    anchor_heads: torch.Tensor | None = None
    """`[num_kv_heads]` int64, the KV heads of the anchor whose pages this layer's KV heads read; None for the same."""
    is_anchor: bool = False
    """Whether other layers read this layer's pages."""
    most_pages: int | None = None
    """The most pages that a row may read on a GPU; None on a CPU, where a batch says it."""
    stop_rule: StopRule | None = None
    """The rule that ends attention early; None for never."""
    routing: GroupRouting | None = None
    """The routing that skips KV groups; None for none."""
    counters: torch.Tensor | None = None
    """`[num_kv_heads, 4]` int64, see `stopping.count_reads`; None without stopping."""
    prefill: PrefillPlan | None = None
    """Sparse prefill; None for dense prefill."""
    offloads: bool = False
    """Whether keys and values lie in host memory, and statistics in device memory of their own."""
    host_reads: torch.Tensor | None = None
    """`[num_kv_heads, 2]` int64: pages read, and those of them read from host memory; None without offloading."""
    moves_tokens: bool = False
    """Whether compaction moves the kept tokens of a prompt to other blocks."""
    rolling: RollingPlan | None = None
    """Rolling positions; None if positions are those of the text."""

    @property
    def scores_pages(self) -> bool:
        """Whether decoding tokens choose pages by statistics. Statistics may exist for prefill alone."""
        return isinstance(self.selector, ScoredSelection)

    @property
    def selects_in_torch(self) -> bool:
        """Whether the policy's `select` chooses the pages, because the decode kernel does not know the policy."""
        return self.selector is not None and not self.selector.has_kernel

    @property
    def reads_selection(self) -> bool:
        """Whether decoding tokens read only chosen pages."""
        return reads_selection(self.selector)

    @property
    def is_sparse(self) -> bool:
        """Whether decoding tokens run the kernels of the plugin."""
        return self.selector is not None or self.routing is not None

    @property
    def needs_cache_views(self) -> bool:
        """Whether kernels of the plugin read or write this layer's cache."""
        extra = self.moves_tokens or self.prefill is not None or self.rolling is not None
        return self.is_sparse or extra or self.statistics is not None

    @cached_property
    def page_selection(self) -> PageSelection | None:
        """The selection of the settings for the decode kernel; None if every page may be read."""
        return self.selector.page_selection() if reads_selection(self.selector) else None

    @cached_property
    def roomy_selection(self) -> PageSelection | None:
        """The same selection with room for the most pages that a row may read on a GPU."""
        selection = self.page_selection
        return selection if selection is None or self.most_pages is None else replace(selection, k=self.most_pages)

    def selection_of(self, batch: DecodeBatch) -> PageSelection | None:
        """Returns the selection of a batch, with room for the largest budget if the batch has budgets."""
        selection = self.page_selection
        if selection is None or batch.budgets is None:
            return selection
        # On a GPU the host reads no budgets, and later batches replay the launches.
        return replace(selection, k=int(batch.budgets.max())) if self.most_pages is None else self.roomy_selection

    def stopping(self, scratch: torch.Tensor | None = None) -> Stopping | None:
        """Returns the stopping of attention over all pages; None if pages are selected or nothing stops it."""
        if self.selector is None or self.stop_rule is None or not self.selector.reads_every_page:
            return None
        return Stopping(self.stop_rule, self.selector.sink_pages, scratch)


class LayerGroup(NamedTuple):
    """The plans of the layers that share a metadata builder, and their counts."""

    plans: dict[str, LayerPlan]
    counts: list[DeviceCounts]
    """Counts on the device."""
    reads: ContextReads | None
    """Counts the keys read and kept, from lengths; None if lengths do not give them."""
    prefill_rule: PromptRule | None
    """The sparse prefill of these layers; None for dense prefill."""
    group_sizes: set[int]
    """Query heads per KV head of the layers with sparse prefill."""


def plan_layers(
    layers: Mapping[str, Attention],
    sparse: ResolvedConfig,
    vllm_config: VllmConfig,
    block_size: int,
    statistics: StatisticsLayout | None,
    device: torch.device,
    retention: Retention | None = None,
) -> LayerGroup:
    """Plans a group of layers by name.

    Layers that attend to a window or a chunk stay dense. Layers of a draft are dense or select pages, as
    `speculation.draft` says.

    Args:
        layers: the layers by name.
        sparse: the settings of the plugin.
        vllm_config: vLLM's configuration.
        block_size: tokens of a cache block.
        statistics: layout of the statistics rows of these layers; None without statistics.
        device: the device of the layers.
        retention: the retention of these layers; None if they keep every token.

    Raises:
        ConfigurationError: for anchors that these layers cannot have; for routed layers with learned sinks, which
            replace the first token; for a sparse draft with layers that do not attend to their whole context; for
            layers whose positions cannot roll.
    """
    of_draft = {name for name in layers if is_of_draft(name, vllm_config)}
    of_model = {name: layer for name, layer in layers.items() if name not in of_draft}
    routing, skipped = _routing_of(of_model, sparse, vllm_config, device)
    prefill, densities = _prefill_of(of_model, sparse, vllm_config, device)
    selecting = {name: layer for name, layer in of_model.items() if selects_pages(layer, sparse)}
    expect_selecting(of_model, selecting, sparse.anchor_layers)
    anchors = anchors_of(selecting, sparse.anchor_layers, _selecting_everywhere(selecting, sparse, vllm_config))
    heads = heads_of_anchors(anchors, selecting, sparse, first_kv_head(vllm_config) if anchors else 0, device)
    choosing = {name: layer for name, layer in selecting.items() if name not in anchors}
    reads = _counts_of_reads(choosing, sparse, vllm_config, device)
    counters = dict(zip(choosing, reads.of_layers, strict=True)) if reads else {}
    from_host = None
    if sparse.offload is not None and sparse.selector is not None and device.type == "cuda":
        layer = next(iter(layers.values()))
        token_bytes = 2 * layer.head_size * layer.kv_cache_torch_dtype.itemsize
        metrics = host_reads(sparse.selector.page_size * token_bytes)
        from_host = DeviceCounts(numbered_heads(layers, vllm_config), metrics, 2, device)
    pages_read = dict(zip(layers, from_host.of_layers, strict=True)) if from_host else {}
    drafting = of_draft if sparse.draft_is_sparse else set()
    if not all(attends_whole_context(layers[name]) for name in drafting):
        # vLLM builds one batch for all layers of a draft, so all of them must be sparse.
        raise ConfigurationError(
            f"{KEY}.speculation.draft: got sparse with a draft whose layers attend to a window, allowed: dense"
        )
    window = sparse.rolling_window
    rolling = plan_rolling(layers, window, vllm_config.model_config.max_model_len) if window else {}
    plans = {}
    for name, layer in layers.items():
        plans[name] = LayerPlan(
            block_size=block_size,
            page_size=(sparse.selector or EveryPage()).page_size,
            dense_tokens=sparse.config.min_context_tokens - 1,
            max_context=vllm_config.model_config.max_model_len,
            statistics=statistics if attends_whole_context(layer) else None,
            selector=sparse.selector if name in selecting or name in drafting else None,
            anchor=anchors.get(name),
            anchor_heads=heads.get(name),
            is_anchor=name in anchors.values(),
            most_pages=most_pages_on_gpu(sparse.selector) if sparse.selector and device.type == "cuda" else None,
            stop_rule=sparse.stop_rule if name in selecting else None,
            routing=routing.get(name),
            counters=counters.get(name),
            prefill=prefill.get(name),
            offloads=sparse.offload is not None,
            host_reads=pages_read.get(name),
            moves_tokens=sparse.moves_tokens and attends_whole_context(layer),
            rolling=rolling.get(name),
        )
    compacts = sparse.compaction is not None and any(map(attends_whole_context, layers.values()))
    by_length = _context_reads(sparse, retention, block_size) if selecting or compacts else None
    if reads is not None and by_length is not None:
        reads.positions_per_key = by_length.positions_per_key
    counts = [counts for counts in (skipped, reads, densities, from_host) if counts is not None]
    return LayerGroup(
        plans=plans,
        counts=counts,
        reads=by_length,
        prefill_rule=next((plan.rule for plan in prefill.values()), None),
        group_sizes={layers[name].num_heads // layers[name].num_kv_heads for name in prefill},
    )


def is_of_draft(layer_name: str, vllm_config: VllmConfig) -> bool:
    """Returns whether a layer belongs to a draft. vLLM names such layers by kind, or numbers them after the model's."""
    if not drafts_with_attention(vllm_config):
        return False
    parts = layer_name.split(".")
    if parts[0] == "draft_model" or any(part.startswith("mtp") for part in parts):
        return True
    return bool(extract_layer_index(layer_name) >= vllm_config.model_config.hf_text_config.num_hidden_layers)


def selects_pages(layer: Attention, sparse: ResolvedConfig) -> bool:
    """Returns whether decoding tokens of a layer read selected pages."""
    if sparse.selector is None or not attends_whole_context(layer):
        return False
    return _owner_index(layer) >= sparse.config.first_dense_layers


def _selecting_everywhere(
    selecting: Mapping[str, Attention], sparse: ResolvedConfig, vllm_config: VllmConfig
) -> dict[str, Attention]:
    """Returns all layers of the model that select pages in this worker. Layers with another window, cache or block
    table than `selecting` have another builder."""
    if not selecting:
        return {}
    backend = next(iter(selecting.values())).attn_backend
    layers: dict[str, Attention] = get_layers_from_vllm_config(vllm_config, Attention)
    served = {name: layer for name, layer in layers.items() if layer.attn_backend is backend}
    return {
        name: layer
        for name, layer in served.items()
        if selects_pages(layer, sparse) and not is_of_draft(name, vllm_config)
    }


def _owner_index(layer: Attention) -> int:
    """Returns the index of the layer that writes the statistics: this layer, or the layer whose cache it shares."""
    return int(extract_layer_index(layer.kv_sharing_target_layer_name or layer.layer_name))


def first_kv_head(vllm_config: VllmConfig) -> int:
    """Returns the first KV head of this worker, numbered over all tensor-parallel workers."""
    parallel = vllm_config.parallel_config
    total = vllm_config.model_config.get_total_num_kv_heads()
    # Tensor-parallel ranks vary fastest. With fewer KV heads than workers, several workers have a copy of a head.
    return int(parallel.rank % parallel.tensor_parallel_size * total // parallel.tensor_parallel_size)


def _routing_of(
    layers: Mapping[str, Attention], sparse: ResolvedConfig, vllm_config: VllmConfig, device: torch.device
) -> tuple[dict[str, GroupRouting], DeviceCounts | None]:
    """Returns the routing of the routed layers by name, and the counts of skipped groups."""
    routing = sparse.routing
    if routing is None:
        return {}, None
    routed = {
        name: layer
        for name, layer in layers.items()
        if attends_whole_context(layer) and extract_layer_index(name) >= routing.dense_layers
    }
    if not routed:
        return {}, None
    if any(getattr(layer.impl, "sinks", None) is not None for layer in routed.values()):
        raise ConfigurationError("model: got learned attention sinks, allowed with routing: models without them")
    numbered = numbered_heads(routed, vllm_config)
    counts = DeviceCounts(numbered, SKIPPED, 2, device)
    of_layer = {
        name: routing.of_layer(index, heads, device, counted)
        for name, (index, heads), counted in zip(routed, numbered, counts.of_layers, strict=True)
    }
    return of_layer, counts


def _prefill_of(
    layers: Mapping[str, Attention], sparse: ResolvedConfig, vllm_config: VllmConfig, device: torch.device
) -> tuple[dict[str, PrefillPlan], DeviceCounts | None]:
    """Returns the plans of the layers with sparse prefill by name, and the counts of their reads."""
    prefill = sparse.prefill
    if prefill is None:
        return {}, None
    sparsely = {
        name: layer
        for name, layer in layers.items()
        if attends_whole_context(layer) and _owner_index(layer) >= prefill.first_dense_layers
    }
    if not sparsely:
        return {}, None
    reads = BLOCK_READS if sparse.block_prefill is not None else TOKEN_READS
    counts, rule = DeviceCounts(numbered_heads(sparsely, vllm_config), reads, COUNTERS, device), prefill.rule()
    plans = {name: PrefillPlan(rule, counted) for name, counted in zip(sparsely, counts.of_layers, strict=True)}
    return plans, counts


def _counts_of_reads(
    selecting: Mapping[str, Attention], sparse: ResolvedConfig, vllm_config: VllmConfig, device: torch.device
) -> DeviceCounts | None:
    """Returns the counts of reads under stopping; None without."""
    if not selecting or sparse.stop_rule is None:
        return None
    return DeviceCounts(numbered_heads(selecting, vllm_config), READS, 4, device)


def _context_reads(sparse: ResolvedConfig, retention: Retention | None, block_size: int) -> ContextReads | None:
    """Returns counts of keys read and kept by lengths; None if all are read and kept, or lengths do not tell."""
    by_length = sparse.stop_rule is None
    if sparse.compaction is None and (sparse.selector is None or not by_length):
        return None
    return ContextReads(keys_of_layer(sparse, retention, block_size), by_length)


def numbered_heads(layers: Mapping[str, Attention], vllm_config: VllmConfig) -> list[tuple[int, range]]:
    """Returns the index and the KV heads of each layer. KV heads are numbered over all tensor-parallel workers."""
    first = first_kv_head(vllm_config)
    return [(extract_layer_index(name), range(first, first + layer.num_kv_heads)) for name, layer in layers.items()]
