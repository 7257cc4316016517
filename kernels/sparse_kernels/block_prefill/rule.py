"""Says which blocks the tokens of a prompt attend to, as kernels take it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

COUNTERS = 4
"""What is counted of each KV head: past blocks read, past blocks, and of the tiles that choose by mass the estimated
share of the attention weight that is on what they read, in `SHARE_UNITS`, and their number."""
SHARE_UNITS = 1 << 20
"""Shares are counted in this part of one, in whole numbers, so that the order of additions does not matter."""


@dataclass(frozen=True)
class BlockRule:
    """Which blocks of the context a tile of a prompt reads, per KV head.

    A tile is `tile_tokens` positions of the context, from a multiple of that number on. It reads its own blocks,
    causally, and chooses among the blocks before them, its past.
    """

    tile_tokens: int = 64
    """Positions of a tile."""
    block_tokens: int = 64
    """Tokens of a block, the unit of selection."""
    density: float = 0.1
    """Share of its past blocks that a tile reads, where `coverage` is None."""
    coverage: float | None = None
    """Share of the tile's estimated attention weight that what it reads must reach; None to read a fixed share."""
    sink_blocks: int = 1
    """Leading blocks that are always read."""
    recent_blocks: int = 1
    """Newest past blocks that are always read."""
    least_blocks: int = 16
    """Past blocks that a tile reads at least, if it has so many."""
    dense_tokens: int = 8192
    """Tiles that begin before this position read everything."""
    measure: Literal["mass", "maximum"] = "mass"
    """Whether blocks are ranked by their estimated share of the attention weight, added up over the tile's queries, or
    by the largest logit of any of them."""
    std_weight: float = 0.5
    """Weight of the spread in a page's logit, for statistics that have one."""
    query_stride: int = 8
    """One in so many of a tile's tokens scores the blocks, from its last token backwards."""

    def check(self) -> None:
        """Raises ValueError for a rule that chooses nothing sensible."""
        for name in ("tile_tokens", "block_tokens", "query_stride", "least_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: at least 1")
        for name in ("sink_blocks", "recent_blocks", "dense_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: at least 0")
        if not 0 < self.density <= 1:
            raise ValueError(f"density: got {self.density}, allowed: above 0, up to 1")
        if self.measure not in ("mass", "maximum") or (self.is_adaptive and self.measure != "mass"):
            raise ValueError(f"measure: got {self.measure!r}, allowed: 'mass', or 'maximum' without a coverage")
        if self.coverage is not None and not 0 < self.coverage <= 1:
            raise ValueError(f"coverage: got {self.coverage}, allowed: above 0, up to 1")

    @property
    def is_adaptive(self) -> bool:
        """Whether a tile reads as much as its estimated weight asks for, not a fixed share."""
        return self.coverage is not None

    @property
    def is_dense(self) -> bool:
        """Whether every tile reads everything."""
        return (self.density if self.coverage is None else self.coverage) == 1

    def past_blocks(self, position: int) -> int:
        """Returns the past blocks of the tile that holds a position."""
        return position // self.tile_tokens * self.tile_tokens // self.block_tokens

    def most_blocks(self, past: int) -> int:
        """Returns how many of its past blocks a tile reads, or at most reads where the rule is adaptive."""
        if self.is_adaptive or self.is_dense or past * self.block_tokens < self.dense_tokens:
            return past
        return min(past, max(math.ceil(self.density * past), self.fewest_blocks))

    @property
    def fewest_blocks(self) -> int:
        """Past blocks that a tile reads at least, if it has so many."""
        return max(self.least_blocks, self.sink_blocks + self.recent_blocks)
