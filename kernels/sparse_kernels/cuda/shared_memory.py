"""Counts the shared memory of the parts of a thread block. The kernels assert the same sizes when they are compiled."""

from __future__ import annotations

from sparse_kernels.limits import MAX_K

CHAINS = 32
"""Chains of summation per row: `CHAINS` in merge.cuh."""
_MOST_CHAIN_BYTES = 128 * 1024
_SPARE, _BUCKETS = 64, 256
_WARP = 32
_PARTS = CHAINS // 4


def round_up(value: int, unit: int) -> int:
    """Rounds a value up to a multiple of a unit."""
    return -(-value // unit) * unit


def padded(head_size: int) -> int:
    """Returns the elements of a head in registers and shared memory: `padded` in common.cuh."""
    return round_up(head_size, 64)


def chain_bytes(cluster: int, group_size: int, head_size: int) -> int:
    """Returns the bytes of the sums of a row's chains: `ChainedAttention::Values` in merge.cuh."""
    return CHAINS * group_size * padded(head_size) * 4 // cluster


def merging_bytes(group_size: int, head_size: int) -> int:
    """Returns the bytes of the query and of the merge of chains: `ChainedAttention::Shared` in merge.cuh."""
    return _query_bytes(group_size, head_size) + 3 * CHAINS * group_size * 4


def select_bytes(warps: int) -> int:
    """Returns the bytes of the selection from the keys of a row: `Select::Shared` in select.cuh."""
    counted = max(4 * warps * _WARP, 4 * 2 * _BUCKETS)
    return round_up(4 * (MAX_K + _SPARE) + counted + 8 * warps + 4 * _WARP + 4, 8)


def score_bytes(group_size: int, head_size: int) -> int:
    """Returns the bytes of the query for scores: `ScoreQuery::Shared` in score.cuh."""
    rows = round_up(group_size, 8)
    return 2 * rows * padded(head_size) + 2 * 4 * rows


def probe_bytes(cluster: int, group_size: int) -> int:
    """Returns the bytes of a stop test: `StoppingAttention::Probes` in stop.cuh."""
    probe = 4 * (2 + _WARP)
    return group_size * ((CHAINS // cluster + 2 * _PARTS + 1) * probe + 4)


def piece_bytes(warps: int, group_size: int, head_size: int, stopping: bool) -> int:
    """Returns the bytes of a thread block of `split_attention`: `Shared` in its attend.cu, and the scratch after it."""
    fixed = _query_bytes(group_size, head_size) + (2 * warps + 1) * group_size * 4
    scratch = warps * group_size * head_size * 4
    if stopping:
        fixed += 4 * group_size + 16
        scratch = max(scratch, min(warps, group_size) * (_WARP + 1) * (_WARP + 1) * 4)
    return round_up(fixed, 16) + scratch


def is_wide(group_size: int, head_size: int) -> bool:
    """Returns whether a warp's sums need so many registers that a multiprocessor has room for one thread block."""
    return head_size > 128 or group_size > 8


def least_cluster(group_size: int, head_size: int) -> int:
    """Returns the smallest power of two of thread blocks that have room for the sums of a row's chains."""
    cluster = 1
    while chain_bytes(cluster, group_size, head_size) > _MOST_CHAIN_BYTES:
        cluster *= 2
    return cluster


def _query_bytes(group_size: int, head_size: int) -> int:
    # `AttendQuery` in attend.cuh: the rows of a matrix tile, padded by 64 bytes.
    return round_up(group_size, 8) * (padded(head_size) + 32) * 2
