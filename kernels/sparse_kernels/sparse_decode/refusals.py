"""Which decode steps `sparse_decode` does not serve on a GPU, and why. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator

from sparse_kernels.limits import (
    CLUSTER_CAPABILITY,
    FLOAT8_CAPABILITY,
    FLOAT8_STATISTICS,
    MAX_K,
    MAX_PAGES,
    MAX_PAGES_WITHOUT_CLUSTERS,
    MAX_WIDTH_WITHOUT_CLUSTERS,
    PAGES_OF_A_CONTEXT,
    PAGES_READ,
    SHARED_MEMORY,
    STOP_RULE,
    WIDTH,
    DecodeShape,
    Refusal,
    shared_bytes_of,
)
from sparse_kernels.sparse_decode.launches import most_shared_bytes


def decode_refusals(shape: DecodeShape, capability: tuple[int, int]) -> Iterator[Refusal]:
    """Why `sparse_decode` does not serve a shape on a GPU of a compute capability, if so."""
    clusters = capability >= CLUSTER_CAPABILITY
    if shape.float8_statistics and capability < FLOAT8_CAPABILITY:
        yield Refusal(FLOAT8_STATISTICS, 1, "0 on this GPU")
    if shape.stopping and not clusters:
        yield Refusal(STOP_RULE, 1, "0 on this GPU")
        return
    width = shape.group_size * shape.head_size
    if not clusters and width > MAX_WIDTH_WITHOUT_CLUSTERS:
        yield Refusal(WIDTH, width, f"up to {MAX_WIDTH_WITHOUT_CLUSTERS} on this GPU", MAX_WIDTH_WITHOUT_CLUSTERS)
    most_pages = MAX_PAGES if clusters else MAX_PAGES_WITHOUT_CLUSTERS
    if shape.max_pages > most_pages:
        yield Refusal(PAGES_OF_A_CONTEXT, shape.max_pages, f"up to {most_pages}", most_pages)
    if shape.k > MAX_K:
        yield Refusal(PAGES_READ, shape.k, f"up to {MAX_K}", MAX_K)
    available = shared_bytes_of(capability)
    needed = most_shared_bytes(shape, capability)
    if needed > available:
        yield Refusal(SHARED_MEMORY, needed, f"up to {available} bytes on this GPU", available)
