"""Lays the work of a decode step out over a GPU, and counts the shared memory that it takes. This needs no GPU."""

from __future__ import annotations

import functools
from typing import NamedTuple

from sparse_kernels.cuda.shared_memory import (
    chain_bytes,
    is_wide,
    least_cluster,
    merging_bytes,
    probe_bytes,
    round_up,
    score_bytes,
    select_bytes,
)
from sparse_kernels.limits import (
    CLUSTER_CAPABILITY,
    MAX_GROUP,
    MAX_K,
    MAX_PAGES,
    MAX_PAGES_WITHOUT_CLUSTERS,
    MAX_WIDTH_WITHOUT_CLUSTERS,
    DecodeShape,
    shared_bytes_of,
)


class Launch(NamedTuple):
    """How the work of a row is laid out; its result does not depend on it."""

    fused: bool
    """Whether the launch scores pages, or takes the candidates of long contexts; otherwise it takes scores from
    memory."""
    cluster: int
    """Blocks that share a row; 1 before there were clusters."""
    warps: int
    """Warps of a block."""
    blocks_per_sm: int
    """Blocks that a multiprocessor is to have room for."""
    listed: bool = False
    """Whether the launch takes its pages from memory, where others have scored and selected. It needs no shared memory
    for a row's scores, so contexts may have any length."""
    most_fused: int = 1 << 14
    """Pages of a context, at most, that a fused launch scores. A launch before it finds the candidates of longer ones,
    which more blocks score than a row has."""
    chunk: int = MAX_K
    """Pages of which that launch keeps the best, at least as many as are read."""

    def candidates(self, shape: DecodeShape) -> int:
        """Returns the candidates of the longest context; 0 if the launch scores every context."""
        if not self.fused or shape.max_pages <= self.most_fused:
            return 0
        return -(-shape.max_pages // self.chunk) * shape.k

    def keys(self, shape: DecodeShape) -> int:
        """Returns the pages and candidates, at most, that a block selects from."""
        if self.listed:
            return 0
        candidates = self.candidates(shape)
        return max(min(shape.max_pages, self.most_fused), candidates) if candidates else shape.max_pages


MOST_PAGES_AT_ONCE = MAX_K
"""Pages that are read, at most, where one launch attends to a row. A larger budget is cut into pieces, which more
blocks read than a cluster has, and a launch of its own adds up. The bits differ, so this is one number for all
batches."""


# The launch follows from the number of rows, as measured on an H200: about one wave of blocks, which are large where
# they suffice.
_LAUNCHES = (
    (8, Launch(True, cluster=8, warps=16, blocks_per_sm=1)),
    (24, Launch(True, cluster=4, warps=16, blocks_per_sm=1)),
    (66, Launch(True, cluster=2, warps=16, blocks_per_sm=1)),
    (132, Launch(True, cluster=1, warps=16, blocks_per_sm=1)),
    (1 << 62, Launch(True, cluster=1, warps=8, blocks_per_sm=2)),
)
# Where attention may stop a warp works on one chain at most.
_STOPPING_LAUNCHES = (
    (8, Launch(True, cluster=8, warps=16, blocks_per_sm=1)),
    (24, Launch(True, cluster=4, warps=16, blocks_per_sm=1)),
    (1 << 62, Launch(True, cluster=4, warps=8, blocks_per_sm=2)),
)
# Where a row has one block, a longer context would occupy it long after other rows have ended.
_MOST_FUSED_BY_ONE = 1 << 13
# Small chunks occupy more blocks; large ones leave fewer candidates.
_MOST_CANDIDATES, _MOST_CHUNK = 1 << 14, 1 << 13
_WIDE_RECORD_BYTES = 256
# With wide records, more rows than the first number take half as many warps with twice the registers: as many loads are
# on their way, and more cache is left. More rows than the second take half as many warps, and two blocks find room.
_FEWER_WARPS = (32, 56)


def launch_of(num_rows: int, shape: DecodeShape, record_bytes: int, capability: tuple[int, int]) -> Launch:
    """Returns the launch configuration of a batch.

    Args:
        num_rows: query tokens times KV heads.
        shape: what is compiled.
        record_bytes: bytes of a page's vectors; 0 if nothing is scored.
        capability: compute capability of the GPU.

    Raises:
        ValueError: if attention is to stop without clusters, where the chains of a row find no room.
    """
    clusters = capability >= CLUSTER_CAPABILITY
    wide = is_wide(shape.group_size, shape.head_size)
    if not clusters and shape.stopping:
        raise ValueError(f"rule: got one on compute capability {capability[0]}.x, allowed: 9.0 or later")
    if not clusters:
        launch = Launch(False, 1, warps=8, blocks_per_sm=1 if wide else 2)
        return listed_if_long(launch, shape, MAX_PAGES_WITHOUT_CLUSTERS, capability)
    launches = _STOPPING_LAUNCHES if shape.stopping else _LAUNCHES
    launch = next(launch for most_rows, launch in launches if num_rows <= most_rows)
    if wide:
        launch = launch._replace(cluster=8 if shape.stopping else launch.cluster, warps=8, blocks_per_sm=1)
    fewest, most = _FEWER_WARPS
    if not shape.stopping and record_bytes >= _WIDE_RECORD_BYTES and num_rows > fewest:
        launch = launch._replace(warps=8, blocks_per_sm=1 if wide or num_rows <= most else 2)
    launch = launch._replace(cluster=max(launch.cluster, least_cluster(shape.group_size, shape.head_size)))
    if not record_bytes:
        return launch._replace(fused=False, listed=True)
    if launch.cluster == 1:
        launch = launch._replace(most_fused=_MOST_FUSED_BY_ONE)
    while launch.candidates(shape) > _MOST_CANDIDATES and launch.chunk < _MOST_CHUNK:
        launch = launch._replace(chunk=2 * launch.chunk)
    return listed_if_long(launch, shape, MAX_PAGES, capability)


def listed_if_long(launch: Launch, shape: DecodeShape, most_keys: int, capability: tuple[int, int]) -> Launch:
    """Returns a launch, or the one that takes its pages from memory if a block cannot select from as many keys."""
    if launch.keys(shape) <= most_keys and shared_bytes(launch, shape) <= shared_bytes_of(capability):
        return launch
    return launch._replace(fused=False, listed=True)


@functools.cache
def in_pieces(shape: DecodeShape, capability: tuple[int, int]) -> bool:
    """Returns whether selections of a shape are cut into pieces. It follows from the shape alone, as bits do."""
    if shape.stopping:
        return False
    width = shape.group_size * shape.head_size
    return (
        shape.k > MOST_PAGES_AT_ONCE
        or shape.group_size > MAX_GROUP
        or (capability < CLUSTER_CAPABILITY and width > MAX_WIDTH_WITHOUT_CLUSTERS)
        or most_shared_bytes(shape, capability) > shared_bytes_of(capability)
    )


def fixed_bytes(launch: Launch, shape: DecodeShape) -> int:
    """Returns the shared memory of a block but for values, keys and selected pages: `FIXED_BYTES` in decode.cu."""
    stages = merging_bytes(shape.group_size, shape.head_size) + select_bytes(launch.warps)
    stages = round_up(stages + score_bytes(shape.group_size, shape.head_size), 8)
    return round_up(stages + (probe_bytes(launch.cluster, shape.group_size) if shape.stopping else 0), 16)


def values_bytes(launch: Launch, shape: DecodeShape) -> int:
    """Returns the shared memory of a block for the sums of its chains."""
    return chain_bytes(launch.cluster, shape.group_size, shape.head_size)


def shared_bytes(launch: Launch, shape: DecodeShape) -> int:
    """Returns the shared memory of a block."""
    values, keys = values_bytes(launch, shape), 2 * round_up(launch.keys(shape), 8)
    # A single block no longer needs the keys when it attends.
    both = max(values, keys) if launch.cluster == 1 else values + keys
    return fixed_bytes(launch, shape) + both + 4 * shape.k


def most_shared_bytes(shape: DecodeShape, capability: tuple[int, int]) -> int:
    """Returns the most shared memory that a block takes, whatever the number of rows."""
    table = _STOPPING_LAUNCHES if shape.stopping else _LAUNCHES
    # A launch begins with the row after the last of another.
    rows = {1, *(rows + 1 for rows in (*_FEWER_WARPS, *(most for most, _ in table[:-1])))}
    return max(
        shared_bytes(launch_of(num_rows, shape, record_bytes, capability), shape)
        for num_rows in rows
        for record_bytes in (0, _WIDE_RECORD_BYTES)
    )
