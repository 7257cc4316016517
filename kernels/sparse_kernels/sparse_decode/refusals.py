"""The decode steps that `sparse_decode` does not support on a GPU, with reasons. It needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator

from sparse_kernels.limits import (
    CLUSTER_CAPABILITY,
    FLOAT8_CAPABILITY,
    FLOAT8_STATISTICS,
    MAX_K,
    PAGES_READ,
    SHARED_MEMORY,
    STOP_RULE,
    DecodeShape,
    Refusal,
    shared_bytes_of,
)
from sparse_kernels.sparse_decode.launches import most_shared_bytes


def decode_refusals(shape: DecodeShape, capability: tuple[int, int]) -> Iterator[Refusal]:
    """Yields the reasons why `sparse_decode` does not support a shape at a compute capability.

    Without a stop rule every length, budget and group is supported. With one, the thread blocks of a cluster attend to
    a row page by page, the best page first.
    """
    if shape.float8_statistics and capability < FLOAT8_CAPABILITY:
        yield Refusal(FLOAT8_STATISTICS, 1, "0 on this GPU")
    if not shape.stopping:
        return
    if capability < CLUSTER_CAPABILITY:
        yield Refusal(STOP_RULE, 1, "0 on this GPU")
        return
    if shape.k > MAX_K:
        yield Refusal(PAGES_READ, shape.k, f"up to {MAX_K}", MAX_K)
    available = shared_bytes_of(capability)
    needed = most_shared_bytes(shape, capability)
    if needed > available:
        yield Refusal(SHARED_MEMORY, needed, f"up to {available} bytes on this GPU", available)
