"""Lays the count of a coverage out over a GPU, and counts the shared memory that it takes. This needs no GPU."""

from __future__ import annotations

from sparse_kernels.cuda.shared_memory import round_up
from sparse_kernels.limits import CLUSTER_CAPABILITY, shared_bytes_of

WARPS = 16
"""Of a block. It is one number for all batches, since the sums of the known tokens follow it."""
_MOST_KEPT_PAGES = 1 << 14
"""Pages of a row that a block keeps in shared memory, at most: two blocks find room in a multiprocessor of Hopper."""
_KEPT_BYTES = 6
"""Of a page: its mass and its score."""
_TRIED = 3
"""Digits of a key that are tried at once: `TRIED` in count.cu."""


def fixed_bytes(cluster: int, group_size: int) -> int:
    """Returns the shared memory that a block takes whatever it keeps: `Shared` in count.cu."""
    of_heads = group_size * (8 * WARPS + 4 + 4)
    return of_heads + 4 * (2 * (_TRIED + 1) * cluster * WARPS + 2 * WARPS)


def kept_bytes(kept_pages: int) -> int:
    """Returns the shared memory that a launch asks for, for the pages that a block keeps."""
    return _KEPT_BYTES * kept_pages


def kept_pages_of(width: int, cluster: int, group_size: int, capability: tuple[int, int]) -> int:
    """Returns how many pages of a row a block keeps in shared memory. No count depends on it.

    Args:
        width: pages of a row.
        cluster: blocks that share a row.
        group_size: query heads to a KV head.
        capability: compute capability of the GPU.

    Returns:
        A multiple of eight; 0 where the share of a block finds no room.
    """
    kept = round_up(-(-width // cluster), 8)
    room = shared_bytes_of(capability) - round_up(fixed_bytes(cluster, group_size), 16)
    if capability < CLUSTER_CAPABILITY or kept > _MOST_KEPT_PAGES or kept_bytes(kept) > room:
        return 0
    return kept
