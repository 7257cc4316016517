"""The rule by which prompt tokens choose key blocks, as kernels take it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

COUNTERS = 4
"""Counts of each KV head: past blocks read, past blocks, and two for tiles that choose by mass. These are the estimated
share of attention weight on the blocks read, in `SHARE_UNITS`, and the number of such tiles."""
SHARE_UNITS = 1 << 20
"""Units of a share of 1. Shares are counted in whole units, so that the order of additions does not matter."""
_LEAST_ROOM = 16
"""The smallest `padded_blocks`."""


@dataclass(frozen=True)
class BlockRule:
    """Which key blocks of the context a tile of a prompt reads, per KV head.

    A tile is `tile_tokens` consecutive positions and begins at a multiple of that number. It reads its own blocks
    causally, and chooses among its past: the blocks before them.
    """

    tile_tokens: int = 64
    """Positions of a tile."""
    block_tokens: int = 64
    """Tokens of a key block, the unit of selection."""
    density: float = 0.1
    """Share of its past blocks that a tile reads; used if `coverage` is None."""
    coverage: float | None = None
    """Share of the tile's estimated attention weight that the blocks read must reach; None for a fixed `density`."""
    sink_blocks: int = 1
    """Leading blocks that are always read."""
    recent_blocks: int = 1
    """Newest past blocks that are always read."""
    least_blocks: int = 16
    """Smallest number of past blocks that a tile reads, if it has as many."""
    dense_tokens: int = 8192
    """Tiles that begin before this position read everything."""
    measure: Literal["mass", "maximum"] = "mass"
    """`mass` ranks key blocks by their estimated share of the attention weight, summed over the tile's queries.
    `maximum` ranks them by the largest logit of any query."""
    std_weight: float = 0.5
    """Weight of the spread in a page's logit, for statistics that have one."""
    query_stride: int = 8
    """Every `query_stride`-th token of a tile scores the blocks, backwards from its last token."""

    def check(self) -> None:
        """Raises ValueError if a value is out of range."""
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
        """Whether the number of blocks that a tile reads depends on their estimated weight."""
        return self.coverage is not None

    @property
    def is_dense(self) -> bool:
        """Whether every tile reads everything."""
        return (self.density if self.coverage is None else self.coverage) == 1

    def past_blocks(self, position: int) -> int:
        """Returns the past blocks of the tile that holds a position."""
        return position // self.tile_tokens * self.tile_tokens // self.block_tokens

    def contexts_of_kernels(self, longest: int) -> list[int]:
        """Returns lengths of contexts, which together need every kernel that contexts up to `longest` need.

        The kernel that chooses blocks is compiled for each `padded_blocks`.
        """
        contexts = [longest]
        room = padded_blocks(self.past_blocks(longest - 1)) // 2
        while room >= _LEAST_ROOM:
            # The most past blocks for which there is this room.
            contexts.append(min(room * self.block_tokens + 1, longest))
            room //= 2
        return contexts

    def most_blocks(self, past: int) -> int:
        """Returns the number of past blocks that a tile reads; under an adaptive rule the largest number."""
        if self.is_adaptive or self.is_dense or past * self.block_tokens < self.dense_tokens:
            return past
        return min(past, max(math.ceil(self.density * past), self.fewest_blocks))

    @property
    def fewest_blocks(self) -> int:
        """Smallest number of past blocks that a tile reads, if it has as many."""
        return max(self.least_blocks, self.sink_blocks + self.recent_blocks)


def padded_blocks(past: int) -> int:
    """Returns for how many past blocks the kernel that chooses among `past` of them has room: a power of two."""
    return max(1 << max(past - 1, 0).bit_length(), _LEAST_ROOM)
