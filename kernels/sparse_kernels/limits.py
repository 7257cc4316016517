"""The limits of the GPU kernels are stated once: admission asks here, and the kernels are compiled by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

HEAD_SIZES = range(32, 257, 16)
"""Head sizes that the CUDA kernels are written for."""
MAX_GROUP = 16
"""Query heads to a KV head, at most, that a block attends with. More are attended in parts, which cannot stop
together."""
MAX_K = 1024
"""Pages, at most, that one block selects in the order of their scores: `MAX_CANDIDATES` in select.cuh. More are listed
in the order of the text, in which attention cannot stop."""
MAX_PAGES = 1 << 16
"""Pages of a context, at most, that one block selects from: it numbers them in 16 bits. Longer rows of scores are
selected from in a launch of its own."""
MIN_CAPABILITY = (8, 0)
"""The oldest compute capability."""
CLUSTER_CAPABILITY = (9, 0)
"""The first compute capability with clusters of blocks: before it no attention over a selection may stop."""
FLOAT8_CAPABILITY = (8, 9)
"""The first compute capability with instructions for 8-bit floats."""
MAX_WIDTH_WITHOUT_CLUSTERS = 512
"""Query heads to a KV head times head size, at most, of a row that one block attends without clusters: it must hold all
sums of the row in its own shared memory."""
MAX_PAGES_WITHOUT_CLUSTERS = 1 << 15
"""What `MAX_PAGES` is without clusters, for the same reason."""


HEAD_SIZE, GROUP, PAGES_READ = "head size", "query heads to a KV head", "pages read"
STOP_RULE, SHARED_MEMORY = "stop rule", "shared memory of a block"
FLOAT8_STATISTICS, SKETCHES = "float8 statistics", "sketches"


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
    sketches: bool = False
    """Whether the statistics are rotated codes."""


def head_refusals(group_size: int, head_size: int, stopping: bool) -> Iterator[Refusal]:
    """Yields why no kernel serves these heads, with a stop rule or without; nothing if one does."""
    if head_size not in HEAD_SIZES:
        allowed = f"multiples of {HEAD_SIZES.step} from {HEAD_SIZES[0]} to {HEAD_SIZES[-1]}"
        yield Refusal(HEAD_SIZE, head_size, allowed)
    if stopping and group_size > MAX_GROUP:
        yield Refusal(GROUP, group_size, f"up to {MAX_GROUP} where attention may stop", MAX_GROUP)


def shared_bytes_of(capability: tuple[int, int]) -> int:
    """Returns the bytes of shared memory that a block may ask for, as NVIDIA's programming guide lists them.

    A compute capability that the guide did not list when this was written counts as the least of them.
    """
    large = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
    return 1024 * large.get(capability, 99)
