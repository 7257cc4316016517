"""Moves the important tokens of a context into a few of its blocks. The other blocks can be given back."""

from sparse_kernels.compaction.api import (
    ROWS_AT_ONCE,
    ObservationWindow,
    PromptBlocks,
    add_votes,
    compact_prompt,
    voting_rows,
)
from sparse_kernels.compaction.held import add_votes_of_layers, keep_tokens
from sparse_kernels.compaction.layers import HeldBlocks, LayerCaches
from sparse_kernels.compaction.ring import QueryRing
from sparse_kernels.compaction.rule import CompactionRule
from sparse_kernels.compaction.scores import HeldTokens

__all__ = [
    "ROWS_AT_ONCE",
    "CompactionRule",
    "HeldBlocks",
    "HeldTokens",
    "LayerCaches",
    "ObservationWindow",
    "PromptBlocks",
    "QueryRing",
    "add_votes",
    "add_votes_of_layers",
    "compact_prompt",
    "keep_tokens",
    "voting_rows",
]
