"""Computes the temporary memory of a decode step before any batch exists. This needs no GPU."""

from __future__ import annotations

from typing import NamedTuple

from sparse_kernels.cuda.shared_memory import round_up
from sparse_kernels.limits import DecodeShape
from sparse_kernels.page_statistics import StatisticsLayout
from sparse_kernels.page_topk.launches import passes_of
from sparse_kernels.sparse_decode.launches import fitting, in_pieces, launch_of
from sparse_kernels.split_attention.pieces import MAX_SPLITS, PIECES_BYTES, row_bytes

_CANDIDATE_BYTES = 6
"""Of a candidate: its key and its page."""


class StepSize(NamedTuple):
    """The largest decode step of an engine."""

    num_kv_heads: int
    num_requests: int
    tokens_per_request: int

    @property
    def rows(self) -> int:
        """Query tokens times KV heads."""
        return self.num_requests * self.rows_per_request

    @property
    def rows_per_request(self) -> int:
        """Query tokens times KV heads, of a request."""
        return self.num_kv_heads * self.tokens_per_request


def scratch_bytes(
    shape: DecodeShape,
    size: StepSize,
    layout: StatisticsLayout | None,
    capability: tuple[int, int],
    multiprocessors: int,
) -> int:
    """Returns the bytes that a layer needs for a decode step on a GPU, without its inputs and its output.

    Single numbers of rows, and sums of many pages, are left out.

    Args:
        shape: the compiled shape.
        size: of the largest step.
        layout: of the page statistics; None without statistics.
        capability: compute capability of the GPU.
        multiprocessors: of the GPU.
    """
    if in_pieces(shape, capability):
        at_once = requests_in_pieces(shape, size.rows_per_request)
        return min(size.num_requests, at_once) * size.rows_per_request * _bytes_in_pieces(shape)
    if layout is None:
        return 0
    kind = layout.kind
    launch = launch_of(size.rows, shape, layout.record_bytes, capability, kind.is_leveled, multiprocessors)
    if not kind.is_fused:
        launch = fitting(launch._replace(fused=False), shape, capability)
    if launch.fused:
        return size.rows * _CANDIDATE_BYTES * round_up(launch.candidates(shape), 8)
    numbers = 0
    if launch.listed:
        first, *second = passes_of(shape.max_pages, shape.k, size.rows > multiprocessors, capability)
        numbers = 1 + shape.k * (1 + (first.segments if second else 0))
    return size.rows * (4 * numbers + _score_bytes(shape))


def requests_in_pieces(shape: DecodeShape, rows_per_request: int) -> int:
    """Returns the requests whose scores, pages and pieces need at most `PIECES_BYTES`; at least one."""
    return max(1, PIECES_BYTES // (rows_per_request * _bytes_in_pieces(shape)))


def _bytes_in_pieces(shape: DecodeShape) -> int:
    """Returns the bytes of a row's scores, pages and pieces."""
    return _score_bytes(shape) + 4 * shape.k + row_bytes(MAX_SPLITS, shape.group_size, shape.head_size)


def _score_bytes(shape: DecodeShape) -> int:
    return 2 * round_up(shape.max_pages, 8)
