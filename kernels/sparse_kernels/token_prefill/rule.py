"""ZipVL's rule for the prompt tokens that a layer keeps (arXiv 2410.08584, Sec. 4 and supplement A)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class TokenRule:
    """Keep the tokens that hold the share `tau` of the attention of some probe rows: T, the important tokens.

    `others` says what queries outside T do. With `attend`, every query attends to the tokens in T and to its newest
    tokens. With `zero`, as published, the output of a query outside T is zero.
    """

    tau: float = 0.975
    """Smallest share of the accumulated attention on the kept tokens (Eq. 7); 1 keeps every token."""
    recent_probes: int = 64
    """Newest tokens of a chunk that are probe rows."""
    random_probes: int = 64
    """Earlier tokens of the chunk that are drawn as probe rows."""
    seed: int = 0
    """Seed of the draw; its low 32 bits count."""
    dense_tokens: int = 0
    """Contexts of up to this many tokens are attended whole: T is every token."""
    others: Literal["attend", "zero"] = "attend"
    """What queries outside T do."""
    local_tokens: int = 64
    """Newest tokens that each query attends to at least, besides T, itself included; only with `attend`."""
    tile_tokens: int = 128
    """Positions of a tile, whose queries attend to one list of tokens; only with `attend`. A context begins with a
    tile."""
    sink_tokens: int = 4
    """First tokens of a context that are always in T."""
    fixed_ratio: float | None = None
    """Replaces `tau`: the share of a context's tokens that is kept, the control of the paper's Table 3; 1 keeps every
    token."""

    @property
    def keeps_all(self) -> bool:
        """Whether every token is kept."""
        return (self.tau if self.fixed_ratio is None else self.fixed_ratio) >= 1

    @property
    def num_probes(self) -> int:
        """Largest number of probe rows of a chunk."""
        return self.recent_probes + self.random_probes

    def window_start(self, position: torch.Tensor) -> torch.Tensor:
        """Returns where the window of a query begins. With `attend`, the query attends to all tokens from there on.

        The queries of a tile share the window of the tile's first position. A query therefore attends to its newest
        `local_tokens` tokens, and to up to `tile_tokens - 1` tokens before them.

        Args:
            position: positions of queries, any shape, integer.
        """
        return (position // self.tile_tokens * self.tile_tokens + 1 - self.local_tokens).clamp(min=0)

    def check(self) -> None:
        """Raises ValueError unless the rule keeps a token, and each query attends to itself."""
        for name, share in (("tau", self.tau), ("fixed_ratio", self.fixed_ratio)):
            if share is not None and not 0 < share <= 1:
                raise ValueError(f"{name}: got {share}, allowed: above 0, at most 1")
        for name, got, least in (
            ("recent_probes", self.recent_probes, 1),
            ("random_probes", self.random_probes, 0),
            ("dense_tokens", self.dense_tokens, 0),
            ("local_tokens", self.local_tokens, 1),
            ("tile_tokens", self.tile_tokens, 1),
            ("sink_tokens", self.sink_tokens, 0),
        ):
            if got < least:
                raise ValueError(f"{name}: got {got}, allowed: at least {least}")
        if self.others not in ("attend", "zero"):
            raise ValueError(f"others: got {self.others!r}, allowed: attend or zero")
