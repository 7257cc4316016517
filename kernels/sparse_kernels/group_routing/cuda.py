"""Group routing on CUDA: a part of the kernels that attend (`route.cuh`), which take these arguments."""

from __future__ import annotations

from sparse_kernels.cuda.launch import int32
from sparse_kernels.group_routing.api import GROUP_SCORES, GroupRouting


def routing_arguments(routing: GroupRouting | None) -> tuple[object, ...]:
    """Thresholds, score, range of the cubic and counts, as the kernels take them; null pointers without routing."""
    if routing is None:
        return None, int32(0), 0.0, 0.0, None
    first, step = routing.log_range
    return routing.coefficients, int32(GROUP_SCORES.index(routing.score)), first, step, routing.counts
