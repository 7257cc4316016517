"""What the GPU kernels can do, stated once: admission asks, the kernels are compiled by it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

HEAD_SIZES = (64, 128, 256)
"""Head sizes that the CUDA kernels are written for."""
MAX_GROUP = 16
"""Query heads to a KV head, at most."""
MAX_K = 1024
"""Pages that are selected, at most: `MAX_CANDIDATES` in select.cuh."""
MAX_PAGES = 1 << 16
"""Pages of a context, at most, that are selected from: pages of a row are numbered in 16 bits."""
MIN_CAPABILITY = (8, 0)
"""The oldest compute capability."""
CLUSTER_CAPABILITY = (9, 0)
"""The first compute capability with clusters of blocks: before it no attention over a selection may stop."""
FLOAT8_CAPABILITY = (8, 9)
"""The first compute capability with instructions for 8-bit floats."""
MAX_WIDTH_WITHOUT_CLUSTERS = 512
"""Query heads to a KV head times head size, at most, without clusters: a block must hold all sums of a row in its own
shared memory."""
MAX_PAGES_WITHOUT_CLUSTERS = 1 << 15
"""Pages of a context, at most, without clusters, for the same reason."""


class Refusal(NamedTuple):
    """Why the kernels do not serve a shape."""

    field: str
    """One of `head size`, `query heads to a KV head`, `query heads to a KV head times head size`, `pages of a context`,
    `pages read`, `stop rule`, `float8 statistics` and `shared memory of a block`."""
    got: int
    allowed: str


@dataclass(frozen=True)
class DecodeShape:
    """What a decode step over a selection is compiled for, as far as limits go."""

    group_size: int
    head_size: int
    max_pages: int
    """Pages of the longest context."""
    k: int
    """Pages that are read."""
    stopping: bool = False
    """Whether attention may stop."""
    float8_statistics: bool = False
    """Whether the vectors of the statistics are 8-bit floats."""


def head_refusals(group_size: int, head_size: int) -> Iterator[Refusal]:
    """Why no kernel serves these heads, if so."""
    if head_size not in HEAD_SIZES:
        yield Refusal("head size", head_size, ", ".join(map(str, HEAD_SIZES[:-1])) + f" or {HEAD_SIZES[-1]}")
    if group_size > MAX_GROUP:
        yield Refusal("query heads to a KV head", group_size, f"up to {MAX_GROUP}")


def decode_refusals(
    shape: DecodeShape, capability: tuple[int, int], shared_bytes_per_block: int | None = None
) -> Iterator[Refusal]:
    """Why `sparse_decode` does not serve a shape on a GPU, if so.

    Args:
        shape: what would be compiled.
        capability: compute capability of the GPU.
        shared_bytes_per_block: shared memory that a block may ask for there; not looked at if left out.
    """
    clusters = capability >= CLUSTER_CAPABILITY
    if shape.float8_statistics and capability < FLOAT8_CAPABILITY:
        yield Refusal("float8 statistics", 1, "0 on this GPU")
    if shape.stopping and not clusters:
        yield Refusal("stop rule", 1, "0 on this GPU")
    width = shape.group_size * shape.head_size
    if not clusters and width > MAX_WIDTH_WITHOUT_CLUSTERS:
        allowed = f"up to {MAX_WIDTH_WITHOUT_CLUSTERS} on this GPU"
        yield Refusal("query heads to a KV head times head size", width, allowed)
    most_pages = MAX_PAGES if clusters else MAX_PAGES_WITHOUT_CLUSTERS
    if shape.max_pages > most_pages:
        yield Refusal("pages of a context", shape.max_pages, f"up to {most_pages}")
    if shape.k > MAX_K:
        yield Refusal("pages read", shape.k, f"up to {MAX_K}")
    if shared_bytes_per_block is not None:
        from sparse_kernels.sparse_decode.launches import most_shared_bytes

        needed = most_shared_bytes(shape, capability)
        if needed > shared_bytes_per_block:
            yield Refusal("shared memory of a block", needed, f"up to {shared_bytes_per_block} bytes on this GPU")
