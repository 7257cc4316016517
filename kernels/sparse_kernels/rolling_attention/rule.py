"""The tokens that a window reads, and the rotation of queries for the first tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RollingWindow:
    """The context tokens that a query token reads, and their positions (StreamingLLM, arXiv 2309.17453)."""

    sink_tokens: int
    """First tokens of a context, which are always read."""
    cache_tokens: int
    """Tokens that are read: the first tokens and the newest tokens, the query token included."""
    whole_tokens: int
    """Contexts of up to this many tokens are read whole, with the positions of the text; at least `cache_tokens`."""

    @property
    def newest_tokens(self) -> int:
        """Tokens of the sliding window."""
        return self.cache_tokens - self.sink_tokens

    def check(self) -> None:
        """Raises ValueError unless `cache_tokens` exceeds `sink_tokens` and `whole_tokens` is large enough."""
        if self.sink_tokens < 0:
            raise ValueError(f"sink_tokens: got {self.sink_tokens}, allowed: at least 0")
        if self.newest_tokens < 1:
            raise ValueError(f"cache_tokens: got {self.cache_tokens}, allowed: at least {self.sink_tokens + 1}")
        if self.whole_tokens < self.cache_tokens:
            raise ValueError(f"whole_tokens: got {self.whole_tokens}, allowed: at least {self.cache_tokens}")

    def leaves_out(self, position: torch.Tensor) -> torch.Tensor:
        """Returns whether tokens at these positions do not read their whole contexts; bool."""
        return position >= self.whole_tokens

    def nearer(self, position: torch.Tensor) -> torch.Tensor:
        """Returns how many positions nearer the first tokens appear to tokens at these positions.

        In a full cache the newest token has position `cache_tokens - 1` and the first token 0. Their distance is that
        of a text of `cache_tokens` tokens: delta = position - (cache_tokens - 1).
        """
        return torch.where(self.leaves_out(position), position - (self.cache_tokens - 1), 0)


@dataclass(frozen=True)
class Rotation:
    """The rotary position embedding of a model."""

    table: torch.Tensor
    """`[num_positions, 2 * n]` floating point, the last dimension contiguous: cosines of the n angles of each position,
    then their sines. Both may have a common positive factor."""
    interleaved: bool = False
    """Whether adjacent elements of a head are rotated together; otherwise element i and element i + n."""

    @property
    def rotary_size(self) -> int:
        """Leading elements of a head that are rotated; the others have no position."""
        return self.table.shape[1]

    def turn_back(self, query: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Returns queries as they would be at earlier positions.

        The rotations by p and -d combine to the rotation by p - d, for any scaling of the angles. A factor of the
        table, as in YaRN, is already in the queries, so this rotation omits it.

        Args:
            query: `[num_tokens, num_heads, head_size]` float32, rotated to their positions.
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
