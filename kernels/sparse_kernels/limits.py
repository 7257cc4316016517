"""The limits of the GPU kernels. Admission reads them, and the kernels are compiled with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

HEAD_SIZES = range(32, 257, 16)
"""Head sizes that the CUDA kernels support."""
MAX_GROUP = 16
"""Most query heads per KV head that one thread block attends with. Larger groups are attended in parts, which cannot
stop together."""
MAX_K = 1024
"""Most pages that one thread block selects in the order of their scores: `MAX_CANDIDATES` in select.cuh. A larger
selection is listed in text order, and attention cannot stop early."""
MAX_PAGES = 1 << 16
"""Most pages of a context that one thread block selects from: it numbers them in 16 bits. Longer rows of scores need a
separate launch."""
MIN_CAPABILITY = (8, 0)
"""The lowest supported compute capability."""
CLUSTER_CAPABILITY = (9, 0)
"""The first compute capability with clusters of thread blocks. Below it, sparse attention cannot stop early."""
FLOAT8_CAPABILITY = (8, 9)
"""The first compute capability with instructions for 8-bit floats."""
MAX_WIDTH_WITHOUT_CLUSTERS = 512
"""Largest product of query heads per KV head and head size without clusters: one thread block must hold all sums of a
row in its shared memory."""
MAX_PAGES_WITHOUT_CLUSTERS = 1 << 15
"""`MAX_PAGES` without clusters, for the same reason."""


HEAD_SIZE, GROUP, PAGES_READ = "head size", "query heads to a KV head", "pages read"
STOP_RULE, SHARED_MEMORY = "stop rule", "shared memory of a block"
FLOAT8_STATISTICS = "float8 statistics"


class Refusal(NamedTuple):
    """Why the kernels do not support a shape."""

    field: str
    """The refused field, one of the names above."""
    got: int
    allowed: str
    most: int = 0
    """The largest supported number, if the limit is a number."""


@dataclass(frozen=True)
class DecodeShape:
    """The properties of a decode step over a selection that limits depend on."""

    group_size: int
    head_size: int
    max_pages: int
    """Pages of the longest context."""
    k: int
    """Pages that a row reads."""
    stopping: bool = False
    """Whether attention may stop early."""
    float8_statistics: bool = False
    """Whether the vectors of the statistics are 8-bit floats."""


def head_refusals(group_size: int, head_size: int, stopping: bool) -> Iterator[Refusal]:
    """Yields why no kernel supports these heads, with or without a stop rule; nothing if one does."""
    if head_size not in HEAD_SIZES:
        allowed = f"multiples of {HEAD_SIZES.step} from {HEAD_SIZES[0]} to {HEAD_SIZES[-1]}"
        yield Refusal(HEAD_SIZE, head_size, allowed)
    if stopping and group_size > MAX_GROUP:
        yield Refusal(GROUP, group_size, f"up to {MAX_GROUP} where attention may stop", MAX_GROUP)


def shared_bytes_of(capability: tuple[int, int]) -> int:
    """Returns the bytes of shared memory that a thread block may request, from NVIDIA's programming guide.

    A compute capability that is not in the table gets the smallest value of the table.
    """
    large = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
    return 1024 * large.get(capability, 99)
