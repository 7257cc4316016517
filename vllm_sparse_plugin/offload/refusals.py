"""Sizes the cache by host memory, and refuses what offloading does not serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_sparse_plugin.config import KEY, Offload, ResolvedConfig, ZipVLPrefill
from vllm_sparse_plugin.config.offload import AUTO
from vllm_sparse_plugin.engine_traits import moved_blocks, shared_caches, unlike_layers_or_engines
from vllm_sparse_plugin.offload.memory import Pinned, available_memory
from vllm_sparse_plugin.policies import reads_selection
from vllm_sparse_plugin.requests.arguments import largest_selection

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SHARE = 0.7
"""Share of the free host memory that `auto` takes. The rest is for the weights while they load, and for other
programs."""


def refuse_offload(vllm_config: VllmConfig, config: ResolvedConfig) -> Iterator[tuple[str, object, str]]:
    """Yields the field, the value and the allowed values of options that are not proven right with offloading."""
    from vllm.platforms import current_platform

    traits = [*unlike_layers_or_engines(vllm_config), *shared_caches(vllm_config)]
    refused = dict.fromkeys([*traits, *moved_blocks(vllm_config)], True)
    refused["sleep mode"] = bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))
    for got, holds in refused.items():
        if holds:
            yield f"{KEY}.offload", got, "null"
    yield from refuse_settings(config, on_gpu=not current_platform.is_cpu())
    assert config.offload is not None
    yield from _refuse_size(vllm_config, config.offload)


def refuse_settings(config: ResolvedConfig, on_gpu: bool) -> Iterator[tuple[str, object, str]]:
    """Yields the field, the value and the allowed values of settings that offloading excludes with every model."""
    refused = {
        # Each step would read the whole cache over the bus.
        f"policy {config.selection.name()}": not reads_selection(config.selector),
        f"{config.config.first_dense_layers} leading dense layers": config.config.first_dense_layers > 0,
    }
    sections = ("compaction", "routing", "stopping", "lossless")
    refused |= {f"a section and {KEY}.{name}": getattr(config.config, name) is not None for name in sections}
    # Lists of tokens are read from the cache itself, over the bus.
    refused[f"a section and {KEY}.prefill.method zipvl"] = isinstance(config.config.prefill, ZipVLPrefill)
    for got, holds in refused.items():
        if holds:
            yield f"{KEY}.offload", got, "null"
    selector, least = config.selector, config.config.min_context_tokens
    if selector is not None and reads_selection(selector) and on_gpu:
        # Contexts that are read whole have copies up to the largest selection; longer ones would cross the bus.
        most = largest_selection(config) * selector.page_size
        if least > most + 1:
            yield f"{KEY}.min_context_tokens", least, f"up to {most + 1} with offload"


def _refuse_size(vllm_config: VllmConfig, offload: Offload) -> Iterator[tuple[str, object, str]]:
    from vllm.platforms import current_platform

    field, free = f"{KEY}.offload.host_memory", available_memory()
    if current_platform.is_cpu() and offload.hot_pages != Offload().hot_pages:
        yield f"{KEY}.offload.hot_pages", offload.hot_pages, "the default on a CPU, which has no copies"
    if offload.bytes is None:
        return
    if current_platform.is_cpu():
        yield field, offload.host_memory, f"{AUTO} on a CPU, where all caches are in host memory"
        return
    given, wanted = vllm_config.cache_config.kv_cache_memory_bytes, _bytes_per_worker(vllm_config, offload)
    if given not in (None, wanted):
        yield "kv_cache_memory_bytes", given, f"none, since {field} says how large the cache is"
    # vLLM also checks configurations once the cache has its memory.
    if free is not None and not Pinned.size and offload.bytes > free:
        yield field, offload.host_memory, f"up to {free / 2**30:.1f}GiB, the free host memory"


def size_cache(vllm_config: VllmConfig, offload: Offload) -> None:
    """Has vLLM size the KV cache on a GPU by host memory instead of the device's.

    vLLM takes `kv_cache_memory_bytes` of each worker without measuring the device. It stays as given if the user
    has set it.
    """
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes is None and not current_platform.is_cpu():
        cache.kv_cache_memory_bytes = _bytes_per_worker(vllm_config, offload)


def _bytes_per_worker(vllm_config: VllmConfig, offload: Offload) -> int | None:
    """Returns the bytes of a worker's cache; None if the free memory is not known."""
    total, free = offload.bytes, available_memory()
    if total is None and free is not None:
        total = int(_SHARE * free)
    return None if total is None else total // int(vllm_config.parallel_config.tensor_parallel_size)
