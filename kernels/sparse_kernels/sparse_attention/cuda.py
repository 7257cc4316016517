"""Attention over selected pages on CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from sparse_kernels.cuda.launch import FORMATS, int32, int64, kernel
from sparse_kernels.paging import PagedTensor

_SOURCE = Path(__file__).with_name("attend.cu")

CHAINS = 32
"""Chains of summation to a row, as merge.cuh has them."""
_MOST_CHAIN_BYTES = 128 * 1024


class Launch(NamedTuple):
    """How the work of a row is laid out; its result does not depend on it."""

    cluster: int
    warps: int
    blocks_per_sm: int


def chain_bytes(cluster: int, group_size: int, head_size: int) -> int:
    """Shared memory of a block for the sums of a row's chains: `ChainedAttention::Values` in merge.cuh."""
    return CHAINS * group_size * head_size * 4 // cluster


def merging_bytes(group_size: int, head_size: int) -> int:
    """Shared memory of a block for the rest: `ChainedAttention::Shared` in merge.cuh, rounded up."""
    rows = -(-group_size // 8) * 8
    return rows * (head_size + 32) * 2 + CHAINS * group_size * 12 + 64


def is_wide(group_size: int, head_size: int) -> bool:
    """Whether a warp's sums take so many registers that a multiprocessor holds one block."""
    return head_size > 128 or group_size > 8


def least_cluster(group_size: int, head_size: int) -> int:
    """Blocks that it takes, in powers of two, for the sums of a row's chains to leave shared memory for the rest."""
    cluster = 1
    while chain_bytes(cluster, group_size, head_size) > _MOST_CHAIN_BYTES:
        cluster *= 2
    return cluster


# By the number of rows, as measured on an H200: about one wave of blocks, fewer where clusters of that size would not
# all find room at once.
_LAUNCHES = (
    (8, Launch(8, warps=8, blocks_per_sm=2)),
    (24, Launch(4, warps=8, blocks_per_sm=2)),
    (66, Launch(2, warps=16, blocks_per_sm=1)),
    (132, Launch(2, warps=8, blocks_per_sm=2)),
    (1 << 62, Launch(1, warps=8, blocks_per_sm=2)),
)


def launch_of(num_rows: int, group_size: int, head_size: int, device: torch.device) -> Launch:
    """The launch configuration of a batch; one block to a row before compute capability 9.0."""
    wide = is_wide(group_size, head_size)
    if torch.cuda.get_device_capability(device)[0] < 9:
        return Launch(1, warps=8, blocks_per_sm=1 if wide else 2)
    launch = next(launch for most_rows, launch in _LAUNCHES if num_rows <= most_rows)
    if wide:
        launch = launch._replace(warps=8, blocks_per_sm=1)
    return launch._replace(cluster=max(launch.cluster, least_cluster(group_size, head_size)))


def cache_arguments(keys: PagedTensor, values: PagedTensor) -> tuple[object, ...]:
    """Pointers to the token rows of a cache and their strides in bytes, as the kernels take them.

    Raises:
        ValueError: if the cache does not store one contiguous row per token.
    """
    view, item = keys.view, keys.view.element_size()
    if keys.token_dims != (0,) or view.stride(-1) != 1 or view.stride() != values.view.stride():
        raise ValueError("keys and values: got packed blocks, allowed on CUDA: one contiguous row per token")
    return (
        view, values.view, int64(view.stride(0) * item), int64(view.stride(1) * item), int32(view.stride(-2) * item),
    )  # fmt: skip


def attend_pages(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float,
    launch: Launch | None = None,
) -> torch.Tensor:
    """See `api.attend_pages`."""
    num_tokens, num_kv_heads, group_size, head_size = query.shape
    query = query.flatten(1, 2)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    launch = launch or launch_of(num_tokens * num_kv_heads, group_size, head_size, query.device)
    macros = {
        "QUERY": FORMATS[query.dtype],
        "KV": FORMATS[keys.view.dtype],
        "OUTPUT": FORMATS[output.dtype],
        "GROUP": group_size,
        "HEAD_SIZE": head_size,
        "PAGE_SIZE": keys.page_size,
        "PAGES_PER_BLOCK": keys.pages_per_block,
        "CLUSTER": launch.cluster,
        "WARPS": launch.warps,
        "BLOCKS_PER_SM": launch.blocks_per_sm,
    }
    compiled = kernel(_SOURCE, query.device, macros, 32 * launch.warps)
    shared_bytes = chain_bytes(launch.cluster, group_size, head_size) + merging_bytes(group_size, head_size)
    compiled.reserve_shared(shared_bytes, launch.blocks_per_sm)
    table = block_table.int()
    compiled.launch(
        (launch.cluster, num_kv_heads, num_tokens),
        query, int64(query.stride(0)), int64(query.stride(1)),
        *cache_arguments(keys, values),
        table, int64(table.stride(0)), context_lens.int(), pages.int().contiguous(), int32(pages.shape[2]),
        float(scale), float(softcap), None if sinks is None else sinks.float(),
        output, int64(output.stride(0)), shared_bytes=shared_bytes,
    )  # fmt: skip
    return output
