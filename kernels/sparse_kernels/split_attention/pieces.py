"""The number of pieces of a context, and their memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_kernels.rules import StopRule

MAX_SPLITS = 64
"""The most pieces of a context without a stop rule."""
LEAST_SPLITS = 8
PIECES_BYTES = 1 << 30
"""The most bytes for stored pieces. A larger batch is attended in parts."""


@dataclass(frozen=True)
class Stopping:
    """Early stopping of attention over all pages."""

    rule: StopRule
    """The stop rule. A piece is one test interval."""
    sink_pages: int = 0
    """First pages, which are read before the others. The others follow newest first."""
    scratch: torch.Tensor | None = None
    """A result of `stop_scratch`. A call allocates its own scratch if this is None or has no room for a request."""


def splits_for(max_tokens: int, num_query_heads: int, head_size: int) -> int:
    """Returns the most pieces of a context without a stop rule.

    An engine uses one number all the time, so that bits do not depend on the batch.

    Args:
        max_tokens: the most query tokens of a batch.
        num_query_heads: query heads of a layer.
        head_size: elements of a head.
    """
    piece_bytes = max_tokens * num_query_heads * head_size * 4
    return max(LEAST_SPLITS, min(MAX_SPLITS, PIECES_BYTES // piece_bytes))


def stop_scratch(rule: StopRule, num_rows: int, context_tokens: int, device: torch.device) -> torch.Tensor:
    """Allocates scratch that consecutive calls may share. Every call leaves zeros.

    Args:
        rule: the stop rule.
        num_rows: the most rows (query tokens times KV heads). Larger batches are attended in parts.
        context_tokens: tokens that fit a row of the block table.
        device: the device of the scratch.

    Returns:
        `[n]` int32 zeros.
    """
    numbers = num_rows * scratch_numbers(pieces_of(context_tokens, rule))
    return torch.zeros(numbers, dtype=torch.int32, device=device)


def pieces_of(context_tokens: int, rule: StopRule) -> int:
    """Returns the pieces of the longest context under a stop rule: its test intervals."""
    return max(1, -(-context_tokens // rule.block_tokens))


def scratch_numbers(pieces: int) -> int:
    """Returns how many numbers the thread blocks of a row share: `RowMarks` in marks.cuh."""
    return 2 + pieces


def rows_at_once(pieces: int, group_size: int, head_size: int, rows_per_request: int) -> int:
    """Returns the rows of the whole requests whose pieces fit `PIECES_BYTES`; those of at least one request."""
    fitting = PIECES_BYTES // row_bytes(pieces, group_size, head_size)
    return max(1, fitting // rows_per_request) * rows_per_request


def row_bytes(pieces: int, group_size: int, head_size: int) -> int:
    """Returns the bytes of a row's pieces: the outputs and weights of its query heads."""
    return pieces * group_size * (head_size + 2) * 4
