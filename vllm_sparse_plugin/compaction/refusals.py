"""Refuses options that do not fit a method of compaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_sparse_plugin.config import KEY, ResolvedConfig
from vllm_sparse_plugin.engine_traits import layers_over_everything
from vllm_sparse_plugin.evictions import Compaction
from vllm_sparse_plugin.notices import EIGHT_BIT_CACHES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_QUERY_BYTES = 16 << 30
"""Bytes of the queries that a worker may keep for evictions."""


def refuse_evictions(vllm_config: VllmConfig, compaction: Compaction) -> Iterator[tuple[str, object, str]]:
    """Yields the field, the value and the allowed values of options that do not fit the evictions."""
    model = vllm_config.model_config
    layers, heads = layers_over_everything(vllm_config), model.get_num_attention_heads(vllm_config.parallel_config)
    running = vllm_config.scheduler_config.max_num_seqs
    of_request = compaction.query_bytes(layers, heads, model.get_head_size(), model.dtype.itemsize)
    if running * of_request > _QUERY_BYTES:
        size = f"{of_request / 2**20:.1f} MiB of queries"
        allowed = f"at most {_QUERY_BYTES // of_request}: each running request keeps {size} for {KEY}.compaction"
        yield "max_num_seqs", running, allowed


def refuse_rolling(config: ResolvedConfig, cache_dtype: str) -> Iterator[tuple[str, object, str]]:
    """Yields the field, the value and the allowed values of options that do not fit rolling positions."""
    field = f"{KEY}.compaction.positions"
    if cache_dtype in EIGHT_BIT_CACHES:
        yield field, "rolling with a KV cache of 8 bits", "text"
    # Every token reads only the window, and the kernel of rolling positions supports no other selection.
    policy = config.selection.name()
    if policy != "dense":
        yield "selection.policy", f"{policy} with compaction.positions rolling", "dense"
    for section in ("routing", "stopping", "prefill"):
        if getattr(config.config, section) is not None:
            yield field, f"rolling beside {KEY}.{section}", "text"
