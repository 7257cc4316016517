"""The limits of the GPU kernels are stated once: admission asks here, and the kernels are compiled by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
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


HEAD_SIZE, GROUP, WIDTH = "head size", "query heads to a KV head", "query heads to a KV head times head size"
PAGES_OF_A_CONTEXT, PAGES_READ = "pages of a context", "pages read"
STOP_RULE, FLOAT8_STATISTICS, SHARED_MEMORY = "stop rule", "float8 statistics", "shared memory of a block"


class Refusal(NamedTuple):
    """Why the kernels do not serve a shape."""

    field: str
    """What is refused, one of the names above."""
    got: int
    allowed: str
    most: int = 0
    """The largest number that is served, where it is a number that limits."""


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
    """Yields why no kernel serves these heads; nothing if one does."""
    if head_size not in HEAD_SIZES:
        yield Refusal(HEAD_SIZE, head_size, ", ".join(map(str, HEAD_SIZES[:-1])) + f" or {HEAD_SIZES[-1]}")
    if group_size > MAX_GROUP:
        yield Refusal(GROUP, group_size, f"up to {MAX_GROUP}", MAX_GROUP)


def shared_bytes_of(capability: tuple[int, int]) -> int:
    """Returns the bytes of shared memory that a block may ask for, as NVIDIA's programming guide lists them.

    A compute capability that the guide did not list when this was written counts as the least of them.
    """
    large = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
    return 1024 * large.get(capability, 99)
