"""Says how many pieces a context is cut into, and what memory that takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_kernels.rules import StopRule

MAX_SPLITS = 64
"""Pieces of a context, at most, that are attended side by side without a rule."""
LEAST_SPLITS = 8
PIECES_BYTES = 1 << 30
"""Memory, at most, for what is stored of the pieces of contexts; a batch that needs more is attended in parts."""


@dataclass(frozen=True)
class Stopping:
    """Attention to everything that may stop."""

    rule: StopRule
    """When attention stops. A piece is a block of the rule."""
    sink_pages: int = 0
    """Leading pages that are read first, before the newest and those before it."""
    scratch: torch.Tensor | None = None
    """What `stop_scratch` gives. Without it, and if it does not hold a request, a call makes its own."""


def splits_for(max_tokens: int, num_query_heads: int, head_size: int) -> int:
    """Returns how many pieces a context is cut into, at most, without a rule.

    It is one number for the life of an engine, since a batch must not change a bit.

    Args:
        max_tokens: query tokens of a batch, at most.
        num_query_heads: query heads of a layer.
        head_size: elements of a head.
    """
    piece_bytes = max_tokens * num_query_heads * head_size * 4
    return max(LEAST_SPLITS, min(MAX_SPLITS, PIECES_BYTES // piece_bytes))


def stop_scratch(rule: StopRule, num_rows: int, context_tokens: int, device: torch.device) -> torch.Tensor:
    """Makes scratch that calls which follow each other may share: every call leaves zeros behind.

    Args:
        rule: when attention stops.
        num_rows: query tokens of a batch times KV heads, at most. Batches of more are attended in parts.
        context_tokens: tokens that a row of the block table has room for.
        device: where it is used.

    Returns:
        `[n]` int32 zeros.
    """
    numbers = num_rows * scratch_numbers(pieces_of(context_tokens, rule))
    return torch.zeros(numbers, dtype=torch.int32, device=device)


def pieces_of(context_tokens: int, rule: StopRule) -> int:
    """Returns the pieces of the longest context under a rule: its blocks."""
    return max(1, -(-context_tokens // rule.block_tokens))


def scratch_numbers(pieces: int) -> int:
    """Returns how many numbers the blocks of a row share: `RowMarks` in marks.cuh."""
    return 2 + pieces


def rows_at_once(pieces: int, group_size: int, head_size: int) -> int:
    """Returns how many rows' pieces `PIECES_BYTES` hold."""
    return max(1, PIECES_BYTES // (pieces * group_size * (head_size + 2) * 4))
