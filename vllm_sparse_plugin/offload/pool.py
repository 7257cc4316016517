"""Allocates the KV cache in pinned host memory that the device can read and write."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from sparse_kernels.hot_pages import WAYS, HotPool
from sparse_kernels.limits import DecodeShape
from sparse_kernels.sparse_decode.launches import in_pieces
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheLayout, UniformTypeKVCacheSpecs

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.config import KEY, ResolvedConfig
from vllm_sparse_plugin.engine_settings import resolved
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.offload.memory import Pinned, available_memory
from vllm_sparse_plugin.offload.staging import stored_dtype
from vllm_sparse_plugin.requests.arguments import largest_selection

logger = init_logger(f"vllm.{__name__}")

_GRAPHS = 1 << 30
"""Bytes of device memory that stay free for CUDA graphs."""
_PINNED_AT_ONCE = 1 << 38
"""Bytes of host memory that one call pins, as vLLM pins its own host pools."""


def allocate_cache(allocate: Callable[..., dict[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
    """Allocates the KV cache where the settings of the loading engine say; for the arguments see vLLM's function."""
    vllm_config = get_current_vllm_config_or_none()
    name = None if vllm_config is None else compat.chosen_backend(vllm_config, BACKENDS)
    if name is not None:
        config = resolved(vllm_config, BACKENDS[name])
        if config.offload is not None:
            return allocate_in_host_memory(vllm_config, config, allocate, *args, **kwargs)
    return allocate(*args, **kwargs)


def allocate_in_host_memory(
    vllm_config: VllmConfig,
    config: ResolvedConfig,
    allocate: Callable[..., dict[str, torch.Tensor]],
    kv_cache_config: KVCacheConfig,
    device: torch.device,
    layout: KVCacheLayout,
    kernel_block_sizes: list[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the KV cache of each layer by name: tensors on the device whose memory is pinned host memory.

    Args:
        vllm_config: vLLM's configuration, with the layers.
        config: the settings of the plugin.
        allocate: vLLM's `allocate_kv_cache`.
        kv_cache_config: blocks and layers.
        device: the device of the layers.
        layout: order of layers and blocks in memory.
        kernel_block_sizes: tokens of a block in the kernels, by group of layers.

    Raises:
        ConfigurationError: if layers have unlike shapes, the device has no room for the statistics, or the host memory
            cannot be pinned.
    """
    if device.type != "cuda":
        return allocate(kv_cache_config, device, layout, kernel_block_sizes)
    _expect_one_shape(kv_cache_config)
    statistics, room = statistics_bytes(kv_cache_config, config), _room(vllm_config, device)
    _expect_room(statistics, room, kv_cache_config)
    # Tensors without memory say where each layer's blocks are.
    places = allocate(kv_cache_config, torch.device("meta"), layout, kernel_block_sizes)
    started = time.monotonic()
    size = next(iter(places.values())).untyped_storage().nbytes()
    workers = vllm_config.parallel_config.tensor_parallel_size
    memory = pinned_memory(size, workers)
    seconds = time.monotonic() - started
    logger.info(
        "%s.offload: keys and values%s are in %.1f GiB of host memory, pinned in %.1f s; page statistics take %.2f GiB "
        "of device memory",
        KEY, f" of this worker, one of {workers}," if workers > 1 else "", len(memory) / 2**30, seconds,
        statistics / 2**30,
    )  # fmt: skip
    _allocate_copies(vllm_config, config, list(places), list(_specs(kv_cache_config)), device, room - statistics)
    on_device = get_accelerator_view_from_cpu_tensor(memory)
    return {name: place_in(on_device, place) for name, place in places.items()}


def _allocate_copies(
    vllm_config: VllmConfig, config: ResolvedConfig, names: list[str], specs: list[AttentionSpec],
    device: torch.device, room: int,
) -> None:  # fmt: skip
    """Gives each layer copies of pages, of at most `room` bytes together."""
    assert config.offload is not None
    assert config.selector is not None
    spec, page_size, pages = specs[0], config.selector.page_size, config.selector.budget_pages
    requests, layers = vllm_config.scheduler_config.max_num_seqs, vllm_config.compilation_config.static_forward_context
    shape = DecodeShape(
        group_size=layers[names[0]].num_heads // spec.num_kv_heads,
        head_size=spec.head_size,
        max_pages=vllm_config.model_config.max_model_len // page_size,
        k=largest_selection(config),
        stopping=False,
    )
    # Selections in pieces are read where they are.
    wanted = 0 if in_pieces(shape, torch.cuda.get_device_capability(device)) else config.offload.hot_pages
    sets = sets_of(wanted * pages * requests, copy_bytes(specs, page_size), room)
    if not sets:
        logger.warning("%s.offload: no copies of pages stay in device memory, so each page is read over the bus", KEY)
        return
    copies = HotPool.empty(len(names), spec.num_kv_heads, sets, page_size, spec.head_size, stored_dtype(spec), device)
    for index, name in enumerate(names):
        layers[name].impl.keep_copies(copies, index)
    logger.info(
        "%s.offload: copies of pages take %.2f GiB of device memory, as many as %.1f requests read in a step",
        KEY, copies.rows.nbytes / 2**30, sets * WAYS / pages,
    )  # fmt: skip


def copy_bytes(specs: list[AttentionSpec], page_size: int) -> int:
    """Returns the device memory of one copy in each layer and KV head."""
    return sum(spec.num_kv_heads * (page_size * 2 * spec.head_size * spec.dtype.itemsize + 8) for spec in specs)


def sets_of(wanted: float, of_copy: int, room: int) -> int:
    """Returns the sets of copies of each layer and KV head.

    Args:
        wanted: copies that the settings ask for.
        of_copy: bytes of one copy in each layer and KV head.
        room: free bytes.
    """
    return max(0, min(math.ceil(wanted / WAYS), room // (WAYS * of_copy)))


def place_in(memory: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Returns the view of some bytes that a tensor is of its own storage.

    Args:
        memory: `[bytes]` uint8.
        place: a tensor whose storage has as many bytes; it may lack memory.
    """
    typed = memory[: len(memory) // place.itemsize * place.itemsize].view(place.dtype)
    return typed.as_strided(place.shape, place.stride(), place.storage_offset())


def statistics_bytes(kv_cache_config: KVCacheConfig, config: ResolvedConfig) -> int:
    """Returns the device memory of the page statistics of all blocks."""
    total = 0
    for spec in _specs(kv_cache_config):
        layout = config.statistics_layout(spec.head_size, spec.dtype.itemsize)
        if layout is not None:
            rows = kv_cache_config.num_blocks * spec.num_kv_heads * layout.rows(spec.block_size)
            total += rows * 2 * spec.head_size * spec.dtype.itemsize
    return total


def _specs(kv_cache_config: KVCacheConfig) -> Iterable[AttentionSpec]:
    """Yields the specification of each layer's cache."""
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            of_layer = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            assert isinstance(of_layer, AttentionSpec)
            yield of_layer


def _room(vllm_config: VllmConfig, device: torch.device) -> int:
    """Returns the bytes of device memory that the worker may still take. The most memory of a step is not free."""
    free, total = torch.cuda.mem_get_info(device)
    # vLLM has run the largest step before the buffers of prompts were allocated, so it needs both.
    most = torch.cuda.max_memory_allocated(device) + _buffer_bytes(vllm_config)
    unused = torch.cuda.memory_reserved(device) - most
    allowed = int(vllm_config.cache_config.gpu_memory_utilization * total) - (total - free)
    return min(free, allowed) + unused - _GRAPHS


def _buffer_bytes(vllm_config: VllmConfig) -> int:
    """Returns the bytes of the buffers of prompts."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    stagings = [getattr(getattr(layer, "impl", None), "staging", None) for layer in layers]
    return sum(staging.nbytes for staging in {id(each): each for each in stagings if each is not None}.values())


def _expect_one_shape(kv_cache_config: KVCacheConfig) -> None:
    """Expects layers of one shape, because their copies of pages have one."""
    if len({(spec.num_kv_heads, spec.head_size, spec.dtype) for spec in _specs(kv_cache_config)}) > 1:
        raise ConfigurationError("model: got layers of unlike shapes, allowed with offload: layers of one shape")


def _expect_room(statistics: int, room: int, kv_cache_config: KVCacheConfig) -> None:
    """Expects device memory for so many bytes of statistics."""
    if statistics > room:
        total = kv_cache_config.kv_cache_tensors[0].size
        raise ConfigurationError(
            f"{KEY}.offload.host_memory: got {total / 2**30:.1f}GiB for this worker, whose page statistics take "
            f"{statistics / 2**30:.1f} GiB of device memory, allowed: up to "
            f"{max(0.0, total * room / statistics) / 2**30:.1f}GiB"
        )


def pinned_memory(size: int, workers: int = 1) -> torch.Tensor:
    """Returns pinned host memory, `[size]` uint8, all zero. It is given back with the last tensor of it.

    Threads touch the pages first, because pinning touches them one by one. torch's own pinned memory has a power of two
    of bytes, and is never given back.

    Args:
        size: bytes.
        workers: the workers that each pin as much.

    Raises:
        ConfigurationError: if the system has too little memory, or it cannot be pinned.
    """
    field, got = f"{KEY}.offload.host_memory", f"got {size / 2**30:.1f}GiB for this worker"
    free = available_memory()
    if free is not None and size > free:
        # Otherwise the system ends a process, perhaps another one.
        raise ConfigurationError(f"{field}: {got}, allowed: up to {free / 2**30:.1f}GiB, the free host memory")
    if Pinned.free_before is not None and size > Pinned.free_before // workers:
        # Each worker alone finds room, because the others have not taken their parts yet.
        share = Pinned.free_before // workers / 2**30
        raise ConfigurationError(f"{field}: {got}, allowed: up to {share:.1f}GiB, its share of the free host memory")
    try:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigurationError(
            f"{field}: {got}, which the system does not give ({error.strerror}), allowed: less memory"
        ) from error
    # Pinning a huge page takes as long as pinning one of 4 KiB. Some systems have none.
    with suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    # The system would copy every pinned page for a process that this one forks.
    with suppress(OSError):
        block.madvise(mmap.MADV_DONTFORK)
    # It ends before the mapping does, so what is unpinned still has its address.
    pinned = (ctypes.c_uint8 * size).from_buffer(block)
    memory = torch.frombuffer(pinned, dtype=torch.uint8)
    touch(memory, min(16, len(os.sched_getaffinity(0))))
    runtime: Any = torch.cuda.cudart()
    unpin = pin(runtime, memory.data_ptr(), size)
    weakref.finalize(pinned, unpin).atexit = False
    return memory


def pin(runtime: Any, address: int, size: int) -> Callable[[], None]:
    """Pins host memory in parts, and returns the function that unpins it.

    Args:
        runtime: torch's `cudart`.
        address: the first byte.
        size: bytes.

    Raises:
        ConfigurationError: if the driver does not pin a part. Nothing is pinned then.
    """
    parts: list[int] = []

    def unpin() -> None:
        while parts:
            runtime.cudaHostUnregister(parts.pop())
        Pinned.size -= size

    Pinned.size += size
    for start in range(0, size, _PINNED_AT_ONCE):
        code = int(runtime.cudaHostRegister(address + start, min(_PINNED_AT_ONCE, size - start), 0))
        if code:
            unpin()
            raise ConfigurationError(
                f"{KEY}.offload.host_memory: got {size / 2**30:.1f}GiB for this worker, which the driver does not pin "
                f"(error {code}), allowed: less memory, or a higher limit of locked memory"
            )
        parts.append(address + start)
    return unpin


def touch(memory: torch.Tensor, threads: int) -> None:
    """Has the system give pages to memory, `[bytes]` uint8 of zeros, with some threads."""
    part = -(-len(memory) // (threads * mmap.PAGESIZE)) * mmap.PAGESIZE
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start: memory[start : start + part : mmap.PAGESIZE].zero_(), range(0, len(memory), part)))
