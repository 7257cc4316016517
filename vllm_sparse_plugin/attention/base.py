"""What our attention backends share on every platform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.page_statistics import StatisticsLayout
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_sparse_plugin.admission import settings_of
from vllm_sparse_plugin.config import ResolvedConfig, resolve
from vllm_sparse_plugin.diagnostics.live import SKIPPED, VISITS, ContextReads, DeviceCounts, LayerQuality
from vllm_sparse_plugin.errors import ConfigurationError

logger = init_logger(f"vllm.{__name__}")


class SparseBackend:
    """Sparse decode attention; each platform derives it together with vLLM's dense backend there."""

    preset: ClassVar[str]
    """Preset of the registered name."""
    settings: ClassVar[Any] = None
    """Our part of the configuration of the engine that this process loads, set by its layers: vLLM calls class
    methods of a backend with and without its configuration at hand, but builds the layers with it, and first."""

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

    @staticmethod
    def remember_settings() -> None:
        """Keeps the settings of the configuration that vLLM builds a layer with."""
        SparseBackend.settings = settings_of(get_current_vllm_config())

    @classmethod
    def config(cls) -> ResolvedConfig:
        """The configuration of the engine being loaded."""
        current = get_current_vllm_config_or_none()
        return resolve(SparseBackend.settings if current is None else settings_of(current), cls.preset)

    @classmethod
    def statistics_layout(cls, spec: AttentionSpec) -> StatisticsLayout | None:
        """Layout of the statistics rows in blocks of this spec."""
        return cls.config().selection.statistics_layout(spec.head_size, spec.dtype.itemsize)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Adds the statistics rows to the KV block."""
        layout = cls.statistics_layout(spec)
        if layout is None or spec.tokens_per_state != 1:
            return spec
        return replace(spec, tokens_per_state=layout.tokens_per_row)


class DecodeRun(NamedTuple):
    """Consecutive decoding requests of a batch with the same number of query tokens."""

    first_request: int
    num_requests: int
    first_token: int
    num_tokens: int


def decode_runs(query_lens: Sequence[int], longest: int) -> list[DecodeRun]:
    """The requests at the front of a batch that have at most `longest` query tokens, in runs of equal numbers."""
    runs: list[DecodeRun] = []
    request = token = 0
    for length, group in groupby(query_lens):
        if not 0 < length <= longest:
            break
        count = len(list(group))
        runs.append(DecodeRun(request, count, token, count * length))
        request, token = request + count, token + count * length
    return runs


def selects_pages(layer: Attention, sparse: ResolvedConfig) -> bool:
    """Whether decoding tokens of a layer read selected pages."""
    # A layer that shares another's cache can only read statistics that the other one writes.
    owner = layer.kv_sharing_target_layer_name or layer.layer_name
    if sparse.pages is None or layer.sliding_window is not None:
        return False
    return extract_layer_index(owner) >= sparse.config.first_dense_layers


class RoutedLayers:
    """The routing of a group of layers, and the counts of what they skip."""

    def __init__(
        self, layers: Mapping[str, Attention], sparse: ResolvedConfig, vllm_config: VllmConfig, device: torch.device
    ) -> None:
        """Takes the layers by name, of which sliding-window ones and leading ones are left alone.

        Raises:
            ConfigurationError: for a layer with learned sinks, which leave the first token nothing to stand for.
        """
        self.of_layer: dict[str, GroupRouting] = {}
        self.counts: DeviceCounts | None = None
        routing = sparse.routing
        if routing is None:
            return
        routed = {
            name: layer
            for name, layer in layers.items()
            if layer.sliding_window is None and extract_layer_index(name) >= routing.dense_layers
        }
        if not routed:
            return
        if any(getattr(layer.impl, "sinks", None) is not None for layer in routed.values()):
            raise ConfigurationError("model: got learned attention sinks, allowed with routing: models without")
        numbered = _numbered(routed, vllm_config)
        self.counts = DeviceCounts(numbered, SKIPPED, 2, device)
        for name, (index, heads), counts in zip(routed, numbered, self.counts.of_layers, strict=True):
            self.of_layer[name] = routing.of_layer(index, heads, device, counts)


def count_visits_of(
    layers: Mapping[str, Attention], sparse: ResolvedConfig, vllm_config: VllmConfig, device: torch.device
) -> DeviceCounts | None:
    """Gives those of a group of layers whose attention may stop counters of how far it reads; None if none may."""
    stopping = {name: layer for name, layer in layers.items() if layer.impl.selects}
    if sparse.stop_rule is None or not stopping:
        return None
    counts = DeviceCounts(_numbered(stopping, vllm_config), VISITS, 4, device)
    for layer, counters in zip(stopping.values(), counts.of_layers, strict=True):
        layer.impl.counters = counters
    return counts


def context_reads_of(
    layers: Mapping[str, Attention], sparse: ResolvedConfig, longest_query: int | None
) -> ContextReads | None:
    """What counts how far the layers of a group read, from lengths; None if none selects, or attention may stop."""
    if sparse.pages is None or sparse.stop_rule is not None or not any(layer.impl.selects for layer in layers.values()):
        return None
    assert longest_query is not None
    return ContextReads(
        sparse.pages.page_size, sparse.pages.budget_pages, sparse.config.min_context_tokens, longest_query
    )


def _numbered(layers: Mapping[str, Attention], vllm_config: VllmConfig) -> list[tuple[int, range]]:
    """Index and KV heads of each layer, numbered over all tensor-parallel workers."""
    first = first_kv_head(vllm_config)
    return [(extract_layer_index(name), range(first, first + layer.num_kv_heads)) for name, layer in layers.items()]


def first_kv_head(vllm_config: VllmConfig) -> int:
    """The first of this worker's KV heads, numbered over all tensor-parallel workers."""
    parallel = vllm_config.parallel_config
    total = vllm_config.model_config.get_total_num_kv_heads()
    # Tensor-parallel workers are numbered first; with fewer heads than workers, some have copies of one.
    return int(parallel.rank % parallel.tensor_parallel_size * total // parallel.tensor_parallel_size)


def layer_quality(layer: Attention, vllm_config: VllmConfig) -> LayerQuality:
    """What measures a layer's sampled tokens."""
    return LayerQuality(extract_layer_index(layer.layer_name), first_kv_head(vllm_config))


def report_memory(
    name: str, vllm_config: VllmConfig, spec: AttentionSpec, layout: StatisticsLayout, num_layers: int
) -> None:
    """Logs what the statistics of a group of layers take."""
    rows = layout.rows(spec.block_size)
    blocks = vllm_config.cache_config.num_gpu_blocks or 1
    total = spec.page_size_bytes * blocks * num_layers
    share = rows / (spec.block_size + rows)
    logger.info(
        "%s: page statistics (%s, pages of %d tokens) take %.1f MiB of %.1f MiB of KV cache, "
        "%.2f %% on top of keys and values",
        name,
        layout.format,
        layout.page_size,
        total * share / 2**20,
        total / 2**20,
        100 * layout.memory_overhead,
    )
