"""Moves the important tokens of a prompt into a few of its blocks. The other blocks can be given back."""

from sparse_kernels.compaction.api import (
    ROWS_AT_ONCE,
    ObservationWindow,
    PromptBlocks,
    add_votes,
    compact_prompt,
    voting_rows,
)
from sparse_kernels.compaction.rule import CompactionRule

__all__ = [
    "ROWS_AT_ONCE",
    "CompactionRule",
    "ObservationWindow",
    "PromptBlocks",
    "add_votes",
    "compact_prompt",
    "voting_rows",
]
