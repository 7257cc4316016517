"""Lays the count of a coverage out over a GPU, and counts the shared memory that it takes. This needs no GPU."""

from __future__ import annotations

from sparse_kernels.cuda.shared_memory import round_up, score_bytes, select_bytes
from sparse_kernels.limits import CLUSTER_CAPABILITY, MAX_GROUP, MAX_K, MAX_PAGES, shared_bytes_of

WARPS = 16
"""Of a block that counts from the masses of all pages."""
BEST_WARPS = 8
"""Of a block that counts from the best pages: a multiprocessor has room for two."""
_SUMS = 16
"""Sums of the tokens that are always read: `SUMS` in rows.cuh."""
_MOST_KEPT_PAGES = 1 << 14
"""Pages of a row that a block keeps in shared memory, at most: two blocks find room in a multiprocessor of Hopper."""
_KEPT_BYTES = 6
"""Of a page: its mass and its score."""
FEW_ROWS = 8
"""With so few rows, clusters that compare the masses of all pages are faster than one thread block per row."""
SCRATCH_BYTES = 1 << 28
"""Memory for the logits of all heads. A batch that needs more is counted in parts."""
_TRIED = 3
"""Digits of a key that are tried at once: `TRIED` in count.cu."""


def requests_at_once(width: int, group_size: int, rows: int) -> int:
    """Returns how many requests are counted together, so that their logits fit `SCRATCH_BYTES`; at least one.

    Args:
        width: pages of a row.
        group_size: query heads to a KV head.
        rows: rows of a request.
    """
    return max(1, SCRATCH_BYTES // (rows * row_bytes(width, group_size)))


def row_bytes(width: int, group_size: int) -> int:
    """Returns the bytes of a row's masses and of the logits of its heads."""
    return 4 * width * (group_size + 1)


def fixed_bytes(cluster: int, group_size: int) -> int:
    """Returns the shared memory that a block takes whatever it keeps: `Shared` in count.cu."""
    return _heads_bytes(group_size) + 4 * (2 * (_TRIED + 1) * cluster * WARPS + 2 * WARPS)


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


def counts_best(width: int, k: int, group_size: int, head_size: int, capability: tuple[int, int]) -> bool:
    """Returns whether a thread block counts a row from its best pages. Otherwise the masses of all pages are compared.
    Counts are the same.

    Args:
        width: pages of a row.
        k: pages that a row reads, at most.
        group_size: query heads to a KV head.
        head_size: elements of a head.
        capability: compute capability of the GPU.
    """
    fits = best_bytes(width, group_size, head_size) <= shared_bytes_of(capability)
    return fits and k <= MAX_K and group_size <= MAX_GROUP and width <= MAX_PAGES


def best_fixed_bytes(group_size: int, head_size: int) -> int:
    """Returns the shared memory that a thread block takes at any width: `Shared` in best.cu."""
    of_row = select_bytes(BEST_WARPS) + score_bytes(group_size, head_size) + _heads_bytes(group_size)
    return of_row + 4 * (MAX_K + 2 * _TRIED * BEST_WARPS)


def best_bytes(width: int, group_size: int, head_size: int) -> int:
    """Returns the shared memory of a thread block that counts a row from its best pages: also a key of each page."""
    return round_up(best_fixed_bytes(group_size, head_size), 16) + 2 * round_up(width, 8)


def _heads_bytes(group_size: int) -> int:
    # `HeadShares` in rows.cuh.
    return group_size * (8 * _SUMS + 4 + 4)
