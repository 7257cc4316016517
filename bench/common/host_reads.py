"""Pages that decode steps read from host memory."""

from __future__ import annotations

from bench.common.results import Row
from vllm_sparse_plugin.metrics.live import HOST_READS, count_totals


def host_reads() -> tuple[float, int]:
    """Returns the pages that decode steps of this process have read from host memory, and all pages that they read."""
    return count_totals().get(HOST_READS.name, (0.0, 0))


def host_share(before: tuple[float, int], after: tuple[float, int]) -> Row:
    """The column of the share of pages that were read from host memory; none without offloading."""
    pages = after[1] - before[1]
    return {"host_read_share": round((after[0] - before[0]) / pages, 5)} if pages else {}
