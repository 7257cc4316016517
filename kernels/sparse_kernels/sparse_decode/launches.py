"""Chooses the launch of a decode step, and counts its shared memory. It needs no GPU."""

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

MOST_FUSED = 1 << 14
"""The most pages of a context that the thread blocks of a row score, where rows fill the GPU."""


class Launch(NamedTuple):
    """The thread blocks of a row. Results do not depend on it."""

    fused: bool
    """Whether the launch scores pages or reads candidates; otherwise it reads scores from memory."""
    cluster: int
    """Thread blocks that share a row; 1 before compute capability 9.0."""
    warps: int
    """Warps of a thread block."""
    blocks_per_sm: int
    """Thread blocks that a multiprocessor must have room for."""
    listed: bool = False
    """Whether the launch reads its pages from memory, after other launches have scored and selected. It needs no shared
    memory for scores, so contexts may have any length."""
    most_fused: int = MOST_FUSED
    """The most pages of a context that a fused launch scores. For longer contexts a launch before it finds candidates,
    with more thread blocks than a row has."""
    chunk: int = 128
    """The fewest pages of a chunk, whose best are candidates. The length of a context decides how many more it has:
    `Chunks` in params.cuh."""

    def candidates(self, shape: DecodeShape) -> int:
        """Returns the room for the candidates of a context; 0 if the launch scores every context."""
        if not self.fused or shape.max_pages <= self.most_fused:
            return 0
        return max(min(shape.max_pages, _MOST_CANDIDATES), -(-shape.max_pages // MOST_CHUNK) * shape.k)

    def keys(self, shape: DecodeShape) -> int:
        """Returns the most keys, of pages or candidates, that a thread block selects from."""
        if self.listed:
            return 0
        candidates = self.candidates(shape)
        return max(min(shape.max_pages, self.most_fused), candidates) if candidates else shape.max_pages


MOST_CHUNK = 1 << 13
"""The most pages of a chunk: `Chunks::MOST` in params.cuh."""
_MOST_CANDIDATES = 1 << 14
"""The most candidates of a context that does not need more chunks."""
NO_CANDIDATES = 1 << 62
"""`Launch.most_fused` of a launch that scores every context, or none."""
MOST_PAGES_AT_ONCE = MAX_K
"""The most pages of a row that one launch reads. A larger budget is cut into pieces, which more thread blocks than a
cluster's read and another launch adds up. The bits differ, so the number is the same for all batches."""


MEASURED_MULTIPROCESSORS = 132
"""Multiprocessors of an H200, where the tables below were measured. Another GPU takes as many rows more or fewer."""
# The number of rows decides the launch: about one wave of thread blocks, and large thread blocks if they suffice.
_LAUNCHES = (
    (8, Launch(True, cluster=8, warps=16, blocks_per_sm=1)),
    (24, Launch(True, cluster=4, warps=16, blocks_per_sm=1)),
    (66, Launch(True, cluster=2, warps=16, blocks_per_sm=1)),
    (132, Launch(True, cluster=1, warps=16, blocks_per_sm=1)),
    (1 << 62, Launch(True, cluster=1, warps=8, blocks_per_sm=2)),
)
# With a stop rule a warp works on at most one chain.
_STOPPING_LAUNCHES = (
    (8, Launch(True, cluster=8, warps=16, blocks_per_sm=1)),
    (24, Launch(True, cluster=4, warps=16, blocks_per_sm=1)),
    (1 << 62, Launch(True, cluster=4, warps=8, blocks_per_sm=2)),
)
# Few rows leave multiprocessors without work, so a launch before scores sooner: up to the first number of rows above
# the second number of pages.
_FEW_ROWS, _MOST_FUSED_BY_FEW = 2, 1 << 12
# With wide records this also pays for up to so many rows above so many pages.
_FEW_WIDE_ROWS, _MOST_FUSED_WIDE = 8, 1 << 13
# With one thread block per row, a longer context would occupy it long after other rows have ended.
_MOST_FUSED_BY_ONE = 1 << 13
WIDE_RECORD_BYTES = 256
"""Bytes of the vectors of a wide record."""
# With wide records, more rows than the first number take half as many warps with twice the registers: the number of
# loads in flight stays, and more cache is free. More rows than the second number take half as many warps and two thread
# blocks per multiprocessor. In two levels a thread block reads less at once, and keeps its warps.
_FEWER_WARPS = (32, 56)


def launch_of(
    num_rows: int,
    shape: DecodeShape,
    record_bytes: int,
    capability: tuple[int, int],
    leveled: bool = False,
    multiprocessors: int = MEASURED_MULTIPROCESSORS,
) -> Launch:
    """Returns the launch of a batch.

    Args:
        num_rows: query tokens times KV heads.
        shape: the compiled shape.
        record_bytes: bytes of a page's vectors; 0 if nothing is scored.
        capability: compute capability of the GPU.
        leveled: whether records are scored in two levels. A chunk of a context does not tell which pages are refined,
            so there are no candidates.
        multiprocessors: of the GPU.

    Raises:
        ValueError: for a stop rule without clusters, because one thread block has no room for the chains of a row.
    """
    clusters = capability >= CLUSTER_CAPABILITY
    wide = is_wide(shape.group_size, shape.head_size)
    if not clusters and shape.stopping:
        raise ValueError(f"rule: got one on compute capability {capability[0]}.x, allowed: 9.0 or later")
    if not clusters:
        launch = Launch(False, 1, warps=8, blocks_per_sm=1 if wide else 2)
        return fitting(launch, shape, capability)
    launches = _STOPPING_LAUNCHES if shape.stopping else _LAUNCHES

    def few(most_rows: int) -> bool:
        return num_rows <= most_rows * multiprocessors // MEASURED_MULTIPROCESSORS

    launch = next(launch for most_rows, launch in launches if few(most_rows))
    if wide:
        launch = launch._replace(cluster=8 if shape.stopping else launch.cluster, warps=8, blocks_per_sm=1)
    fewest, most = _FEWER_WARPS
    if not shape.stopping and not leveled and record_bytes >= WIDE_RECORD_BYTES and not few(fewest):
        launch = launch._replace(warps=8, blocks_per_sm=1 if wide or few(most) else 2)
    launch = launch._replace(cluster=max(launch.cluster, least_cluster(shape.group_size, shape.head_size)))
    if not record_bytes:
        launch = launch._replace(fused=False, listed=True)
    elif leveled:
        launch = launch._replace(most_fused=NO_CANDIDATES)
    elif launch.cluster == 1:
        launch = launch._replace(most_fused=_MOST_FUSED_BY_ONE)
    elif few(_FEW_ROWS):
        launch = launch._replace(most_fused=_MOST_FUSED_BY_FEW)
    elif few(_FEW_WIDE_ROWS) and record_bytes >= WIDE_RECORD_BYTES:
        launch = launch._replace(most_fused=_MOST_FUSED_WIDE)
    return fitting(launch, shape, capability)


def fitting(launch: Launch, shape: DecodeShape, capability: tuple[int, int]) -> Launch:
    """Returns the launch, or one with as many more thread blocks to a row as its shared memory needs, or one that reads
    its pages from memory if a thread block cannot select from all keys of a row. Results do not depend on it.

    If nothing fits, the result does not either, see `in_pieces`.
    """
    has_clusters = capability >= CLUSTER_CAPABILITY
    most_keys = MAX_PAGES if has_clusters else MAX_PAGES_WITHOUT_CLUSTERS
    clusters = [cluster for cluster in (1, 2, 4, 8) if cluster >= launch.cluster]
    listed = launch._replace(fused=False, listed=True)
    for form in (launch, listed):
        for cluster in clusters if has_clusters else clusters[:1]:
            found = form._replace(cluster=cluster)
            if found.keys(shape) <= most_keys and shared_bytes(found, shape) <= shared_bytes_of(capability):
                return found
    return listed


@functools.cache
def in_pieces(shape: DecodeShape, capability: tuple[int, int]) -> bool:
    """Returns whether selections of a shape are cut into pieces. The shape alone decides this, because bits differ."""
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
    """Returns the shared memory of a thread block without values, keys and selected pages: `FIXED_BYTES` in
    decode.cu."""
    stages = merging_bytes(shape.group_size, shape.head_size) + select_bytes(launch.warps)
    stages = round_up(stages + score_bytes(shape.group_size, shape.head_size), 8)
    return round_up(stages + (probe_bytes(launch.cluster, shape.group_size) if shape.stopping else 0), 16)


def values_bytes(launch: Launch, shape: DecodeShape) -> int:
    """Returns the shared memory for the sums of a thread block's chains."""
    return chain_bytes(launch.cluster, shape.group_size, shape.head_size)


def shared_bytes(launch: Launch, shape: DecodeShape) -> int:
    """Returns the shared memory of a thread block."""
    values, keys = values_bytes(launch, shape), 2 * round_up(launch.keys(shape), 8)
    # A single thread block no longer needs the keys when it attends.
    both = max(values, keys) if launch.cluster == 1 else values + keys
    return fixed_bytes(launch, shape) + both + 4 * shape.k


def most_shared_bytes(shape: DecodeShape, capability: tuple[int, int]) -> int:
    """Returns the most shared memory of a thread block at any number of rows."""
    table = _STOPPING_LAUNCHES if shape.stopping else _LAUNCHES
    # Each launch starts at the row count after the last one of the launch before.
    rows = {1, *(rows + 1 for rows in (*_FEWER_WARPS, *(most for most, _ in table[:-1])))}
    return max(
        shared_bytes(launch_of(num_rows, shape, record_bytes, capability), shape)
        for num_rows in rows
        for record_bytes in (0, WIDE_RECORD_BYTES)
    )
