"""Attention over whole contexts in pieces, with skipped KV groups (SinkRouter) and early stopping (ART)."""

from sparse_kernels.split_attention.api import split_attention
from sparse_kernels.split_attention.pieces import (
    Stopping,
    pieces_of,
    row_bytes,
    rows_at_once,
    scratch_numbers,
    splits_for,
    stop_scratch,
)

__all__ = [
    "Stopping",
    "pieces_of",
    "row_bytes",
    "rows_at_once",
    "scratch_numbers",
    "split_attention",
    "splits_for",
    "stop_scratch",
]
