"""Attends to selected pages on CUDA. Groups of many query heads are split into parts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.cuda.head_parts import attend_in_parts
from sparse_kernels.cuda.launch import FORMATS, kernel
from sparse_kernels.cuda.params import (
    CacheParams,
    ContextParams,
    OutputParams,
    QueryParams,
    SoftmaxParams,
    batch_of,
    pointer,
    struct_of,
)
from sparse_kernels.cuda.shared_memory import chain_bytes, is_wide, least_cluster, merging_bytes
from sparse_kernels.limits import CLUSTER_CAPABILITY, MAX_GROUP, shared_bytes_of

_SOURCE = Path(__file__).with_name("attend.cu")


class Launch(NamedTuple):
    """How the work of a row is laid out. The result does not depend on it."""

    cluster: int
    warps: int
    blocks_per_sm: int


# The launch depends on the number of rows, from measurements on an H200: about one wave of thread blocks, fewer if
# clusters of that size would not all fit at once.
_LAUNCHES = (
    (8, Launch(8, warps=8, blocks_per_sm=2)),
    (24, Launch(4, warps=8, blocks_per_sm=2)),
    (66, Launch(2, warps=16, blocks_per_sm=1)),
    (132, Launch(2, warps=8, blocks_per_sm=2)),
    (1 << 62, Launch(1, warps=8, blocks_per_sm=2)),
)


def shared_bytes(cluster: int, group_size: int, head_size: int) -> int:
    """Returns the shared memory of a thread block, as attend.cu asserts it."""
    return chain_bytes(cluster, group_size, head_size) + merging_bytes(group_size, head_size)


def heads_at_once(group_size: int, head_size: int, capability: tuple[int, int]) -> int:
    """Returns how many query heads of a group a launch attends with: as many as a thread block has room for, without
    clusters."""
    most = MAX_GROUP
    if capability < CLUSTER_CAPABILITY:
        while shared_bytes(1, most, head_size) > shared_bytes_of(capability):
            most -= 1
    return min(group_size, most)


def launch_of(num_rows: int, group_size: int, head_size: int, capability: tuple[int, int]) -> Launch:
    """Returns the launch configuration of a batch. Before compute capability 9.0 a row has one thread block."""
    wide = is_wide(group_size, head_size)
    if capability < CLUSTER_CAPABILITY:
        return Launch(1, warps=8, blocks_per_sm=1 if wide else 2)
    launch = next(launch for most_rows, launch in _LAUNCHES if num_rows <= most_rows)
    if wide:
        launch = launch._replace(warps=8, blocks_per_sm=1)
    cluster = max(launch.cluster, least_cluster(group_size, head_size))
    while shared_bytes(cluster, group_size, head_size) > shared_bytes_of(capability):
        cluster *= 2
    return launch._replace(cluster=cluster)


def attend_pages(
    tokens: QueryTokens, cache: KVCache, pages: torch.Tensor, softmax: Softmax, launch: Launch | None = None
) -> torch.Tensor:
    """See `api.attend_pages`."""
    batch, selected = batch_of(tokens), pages.int().contiguous()
    output = DecodeOutput.like(batch.query)

    def attend(part: DecodeBatch, softmax: Softmax, output: DecodeOutput) -> None:
        _attend(part, cache, selected, softmax, output, launch)

    group_size, capability = batch.group_size(cache.num_kv_heads), torch.cuda.get_device_capability(pages.device)
    most = heads_at_once(group_size, cache.head_size, capability)
    attend_in_parts(batch, cache.num_kv_heads, softmax, output, attend, most)
    return output.heads


def _attend(
    batch: DecodeBatch,
    cache: KVCache,
    selected: torch.Tensor,
    softmax: Softmax,
    output: DecodeOutput,
    launch: Launch | None,
) -> None:
    device, group_size = batch.query.device, batch.group_size(cache.num_kv_heads)
    capability = torch.cuda.get_device_capability(device)
    launch = launch or launch_of(batch.num_tokens * cache.num_kv_heads, group_size, cache.head_size, capability)
    block_bytes = shared_bytes(launch.cluster, group_size, cache.head_size)
    macros = {
        "QUERY": FORMATS[batch.query.dtype],
        "KV": FORMATS[cache.keys.view.dtype],
        "OUTPUT": FORMATS[output.heads.dtype],
        "GROUP": group_size,
        "HEAD_SIZE": cache.head_size,
        "PAGE_SIZE": cache.page_size,
        "PAGES_PER_BLOCK": cache.keys.pages_per_block,
        "CLUSTER": launch.cluster,
        "WARPS": launch.warps,
        "BLOCKS_PER_SM": launch.blocks_per_sm,
        "SHARED_BYTES": block_bytes,
    }
    compiled = kernel(_SOURCE, device, macros, 32 * launch.warps)
    compiled.reserve_shared(block_bytes, launch.blocks_per_sm)
    params = struct_of("AttendParams")(
        query=QueryParams.of(batch.query),
        cache=CacheParams.of(cache),
        contexts=ContextParams.of(batch),
        pages=pointer(selected),
        k=selected.shape[2],
        softmax=SoftmaxParams.of(softmax),
        output=OutputParams.of(output),
    )
    compiled.launch((launch.cluster, cache.num_kv_heads, batch.num_tokens), params, block_bytes)
