"""What a token reads through a window, and how far its query is turned back for the first tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RollingWindow:
    """Which tokens of its context a query token reads, and where it sees them (StreamingLLM, arXiv 2309.17453)."""

    sink_tokens: int
    """First tokens of a context, which are always read."""
    cache_tokens: int
    """Tokens that are read: the first ones and the newest, the token itself included."""
    whole_tokens: int
    """Contexts of up to this many tokens are read whole, at the positions of the text; at least `cache_tokens`."""

    @property
    def newest_tokens(self) -> int:
        """Tokens of the window that slides."""
        return self.cache_tokens - self.sink_tokens

    def check(self) -> None:
        """Raises ValueError unless there is a window beside the first tokens, and a context that is read whole."""
        if self.sink_tokens < 0:
            raise ValueError(f"sink_tokens: got {self.sink_tokens}, allowed: at least 0")
        if self.newest_tokens < 1:
            raise ValueError(f"cache_tokens: got {self.cache_tokens}, allowed: at least {self.sink_tokens + 1}")
        if self.whole_tokens < self.cache_tokens:
            raise ValueError(f"whole_tokens: got {self.whole_tokens}, allowed: at least {self.cache_tokens}")

    def leaves_out(self, position: torch.Tensor) -> torch.Tensor:
        """Returns whether tokens at these positions leave out something of their contexts; bool."""
        return position >= self.whole_tokens

    def nearer(self, position: torch.Tensor) -> torch.Tensor:
        """Returns by how many positions the first tokens appear nearer to tokens at these positions.

        In a cache that is full the newest token has position `cache_tokens - 1` and the first one 0, so they are as far
        apart as in a text of so many tokens: delta = position - (cache_tokens - 1).
        """
        return torch.where(self.leaves_out(position), position - (self.cache_tokens - 1), 0)


@dataclass(frozen=True)
class Rotation:
    """The rotations of a model's rotary positions."""

    table: torch.Tensor
    """`[num_positions, 2 * n]` floating point, the last dimension contiguous: cosines of the n angles of each position,
    then their sines, both times any one positive factor."""
    interleaved: bool = False
    """Whether neighbouring elements of a head are turned together; else element i and element i + n."""

    @property
    def rotary_size(self) -> int:
        """Leading elements of a head that are turned; the others have no position."""
        return self.table.shape[1]

    def turn_back(self, query: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Returns queries as they would be at earlier positions.

        Rotations of positions p and -d make that of p - d, whatever the angles of a position are, so nothing needs to
        know how the model scales them. A factor of the table, as YaRN has one, is in the queries already, so the
        rotation is made without it.

        Args:
            query: `[num_tokens, num_heads, head_size]` float32, turned to their positions.
            by: `[num_tokens]` int64, positions to go back, rows of the table.

        Returns:
            As `query`.
        """
        cos, sin = self.table[by].float().unsqueeze(1).chunk(2, dim=-1)
        length = torch.hypot(cos, sin)
        cos, sin = cos / length, sin / length
        turned, left = query[..., : self.rotary_size], query[..., self.rotary_size :]
        if self.interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        parts = first * cos + second * sin, second * cos - first * sin
        back = torch.stack(parts, dim=-1).flatten(-2) if self.interleaved else torch.cat(parts, dim=-1)
        return torch.cat([back, left], dim=-1)
