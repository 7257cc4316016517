"""The rule for keeping tokens of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_kernels.token_prefill import TokenRule


@dataclass(frozen=True)
class CompactionRule:
    """Which tokens of a prompt are kept (SnapKV, arXiv 2404.14469; H2O, arXiv 2306.14048; ZipVL, arXiv 2410.08584)."""

    window_tokens: int
    """Newest tokens of the prompt. They vote, and they are kept."""
    pool_tokens: int
    """The score of a token is the largest vote among this many tokens around it, an odd number."""
    sink_tokens: int
    """First tokens of the prompt, which are always kept."""
    recent_share: float = 0.0
    """Share of the kept tokens that is reserved for the newest tokens, if this is more than the window."""
    every_query: bool = False
    """Whether queries of the whole prompt vote, by `add_votes` as they are computed; else only the newest vote."""
    probes: TokenRule | None = None
    """Draws the rows that vote, see `voting_rows`; None if all vote."""

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
