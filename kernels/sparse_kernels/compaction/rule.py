"""The rule for keeping tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparse_kernels.compaction.scores import HeldTokens
from sparse_kernels.token_prefill import TokenRule

_RING_TOKENS = 32
"""Queries that vote at once if all queries vote."""


@dataclass(frozen=True)
class CompactionRule:
    """Which tokens are kept (SnapKV, arXiv 2404.14469; H2O, arXiv 2306.14048; ZipVL, arXiv 2410.08584)."""

    window_tokens: int
    """Newest tokens. They vote, and they are kept."""
    pool_tokens: int
    """The score of a token is the largest vote among this many tokens around it, an odd number."""
    sink_tokens: int
    """First tokens of the context, which are always kept."""
    recent_share: float = 0.0
    """Share of the kept tokens that is reserved for the newest tokens, if this is more than the window."""
    every_query: bool = False
    """Whether all queries vote, by `add_votes` as they are computed; else only the newest vote."""
    probes: TokenRule | None = None
    """Draws the rows that vote, see `voting_rows`; None if all vote."""
    score: Callable[[HeldTokens], torch.Tensor] | None = None
    """Returns the scores of a layer's tokens, `[num_kv_heads, num_tokens]`; None: their votes are their scores."""
    in_order_of_votes: bool = False
    """Whether kept tokens are stored by their scores, sinks first, the largest score last; else in text order. A reader
    that begins at the end then meets the newest tokens, and the others by their votes."""

    def scores(self, tokens: HeldTokens) -> torch.Tensor:
        """Returns the scores of a layer's tokens, `[num_kv_heads, num_tokens]` float32.

        Raises:
            ValueError: if `score` returns another shape.
        """
        if self.score is None:
            return tokens.votes
        scores = self.score(tokens)
        if scores.shape != tokens.votes.shape:
            raise ValueError(f"score: got {list(scores.shape)}, allowed: {list(tokens.votes.shape)}")
        return scores.float()

    @property
    def ring_tokens(self) -> int:
        """Newest queries of a request that are kept for its evictions."""
        return _RING_TOKENS if self.every_query else self.window_tokens

    def newest_tokens(self, kept: int) -> int:
        """Returns how many of the newest tokens are always kept if this many tokens are."""
        return max(self.window_tokens, min(int(self.recent_share * kept), kept - self.sink_tokens))

    def check(self) -> None:
        """Raises ValueError if a value is out of range."""
        if self.pool_tokens < 1 or self.pool_tokens % 2 == 0:
            raise ValueError(f"pool_tokens: got {self.pool_tokens}, allowed: an odd number, at least 1")
        for name in ("window_tokens", "sink_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: at least 0")
        if not 0 <= self.recent_share <= 1:
            raise ValueError(f"recent_share: got {self.recent_share}, allowed: 0 to 1")
        if self.probes is not None:
            self.probes.check()
            if not self.every_query:
                raise ValueError("probes: got some, allowed without every_query: None")
