"""Cuts the prompts of a batch into tiles, without asking the device for their lengths."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sparse_kernels.batch import Prompts
from sparse_kernels.block_prefill.rule import BlockRule

_ROWS_OF_A_GROUP = 128
"""Rows that a scoring group has, or a multiple of it."""


@dataclass(frozen=True)
class ScoringRows:
    """The rows of queries that score together. A row is a token of a tile and a query head of a KV head."""

    rows: int
    """Rows of a tile that score."""
    padded: int
    """Room for the rows of a tile, a power of two."""
    tiles: int
    """Tiles of a group."""

    @classmethod
    def of(cls, rule: BlockRule, group_size: int) -> ScoringRows:
        """Returns the shape for so many query heads to a KV head."""
        rows = -(-rule.tile_tokens // rule.query_stride) * group_size
        padded = 1 << (rows - 1).bit_length()
        return cls(rows, padded, max(_ROWS_OF_A_GROUP // padded, 1))

    @property
    def of_group(self) -> int:
        """Rows of a group."""
        return self.padded * self.tiles


@dataclass(frozen=True)
class Tiles:
    """The tiles of a batch of prompts; the host knows how many there may be, the device where they lie.

    Tiles of a request follow each other, and so do the requests. A tile without tokens pads the batch: the host does
    not know whether a chunk begins within a tile, and plans for one more.
    """

    request: torch.Tensor
    """`[num_tiles]` int32, the request of each tile."""
    first_token: torch.Tensor
    """`[num_tiles]` int32, where the tokens of each tile begin in the batch."""
    num_tokens: torch.Tensor
    """`[num_tiles]` int32, tokens of each tile; 0 for padding."""
    past_blocks: torch.Tensor
    """`[num_tiles]` int32, blocks before a tile's own."""
    reads: torch.Tensor
    """`[num_tiles]` int32, past blocks that a tile reads; all of them if that is `past_blocks`. Under an adaptive rule
    the fewest that it reads."""
    end: torch.Tensor
    """`[num_tiles]` int32, the position behind the last token of each tile."""
    group_first: torch.Tensor
    """`[num_groups]` int32, the first tile of each scoring group: consecutive tiles of a request that are scored
    together, since they read the same statistics."""
    group_tiles: torch.Tensor
    """`[num_groups]` int32, how many tiles a group has."""
    slot: torch.Tensor
    """`[num_tiles]` int32, `group * scoring.tiles + place in the group` of each tile."""
    scoring: ScoringRows
    """The shape of a group."""
    context_start: torch.Tensor
    """`[num_requests]` int32, where the tokens of each context begin if all contexts lie one after the other, each
    in room for whole blocks."""
    context_tokens: int
    """Tokens of all that room."""
    max_blocks: int
    """An upper bound of a tile's past and own blocks together."""
    max_past_blocks: int
    """An upper bound of `past_blocks`."""
    max_reads: int
    """An upper bound of the past blocks that a tile reads."""
    _rows: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)
    """What `query_rows` has found; every layer asks."""

    def __len__(self) -> int:
        return len(self.request)

    def query_rows(self, num_kv_heads: int) -> torch.Tensor:
        """Returns where the queries of each tile and KV head begin once they are grouped by tile, then by KV head.

        Returns:
            `[num_tiles * num_kv_heads + 1]` int32, in rows of a group of query heads; the last one is their number.
        """
        if num_kv_heads not in self._rows:
            head = torch.arange(num_kv_heads, dtype=torch.int32, device=self.request.device)
            begin = self.first_token[:, None] * num_kv_heads + self.num_tokens[:, None] * head
            end = (self.first_token[-1:] + self.num_tokens[-1:]) * num_kv_heads
            self._rows[num_kv_heads] = torch.cat([begin.flatten(), end])
        return self._rows[num_kv_heads]


def tiles_at_most(query_tokens: int, tile_tokens: int) -> int:
    """Returns how many tiles a chunk of so many tokens has at most, wherever it begins."""
    return (query_tokens + tile_tokens - 2) // tile_tokens + 1 if query_tokens else 0


def plan_tiles(prompts: Prompts, rule: BlockRule, group_size: int) -> Tiles:
    """Cuts a batch of prompts into tiles. The host does not wait for the device.

    Args:
        prompts: the prompts.
        rule: what a tile is.
        group_size: query heads to a KV head.

    Raises:
        ValueError: if there are no tokens.
    """
    if not prompts.num_tokens:
        raise ValueError("query_lens: got no tokens, allowed: at least one")
    tile, block = rule.tile_tokens, rule.block_tokens
    counts = torch.tensor([tiles_at_most(length, tile) for length in prompts.query_lens])
    scoring = ScoringRows.of(rule, group_size)
    groups = -(-counts // scoring.tiles)
    request = torch.repeat_interleave(counts)
    index = _within(counts)
    slot = torch.repeat_interleave((groups.cumsum(0) - groups) * scoring.tiles, counts) + index
    group_first = torch.repeat_interleave(counts.cumsum(0) - counts, groups) + _within(groups) * scoring.tiles
    last = torch.repeat_interleave(counts.cumsum(0), groups)
    group_tiles = torch.minimum(last - group_first, torch.tensor(scoring.tiles))
    room = torch.tensor([-(-length // block) * block for length in prompts.longest])
    parts = [request, index, slot, group_first, group_tiles, room.cumsum(0) - room]
    known = torch.cat(parts).to(torch.int32)
    if prompts.seq_lens.is_cuda:
        known = known.pin_memory().to(prompts.seq_lens.device, non_blocking=True)
    request, index, slot, group_first, group_tiles, context_start = known.split([len(part) for part in parts])
    asked = request.long()
    start, lengths = prompts.query_start[asked], prompts.seq_lens[asked]
    begin = lengths - (prompts.query_start[asked + 1] - start)
    number = begin // tile + index
    first = torch.minimum(torch.maximum(number * tile, begin), lengths)
    end = torch.minimum((number + 1) * tile, lengths)
    past = number * tile // block
    pasts = [rule.past_blocks(max(length - 1, 0)) for length in prompts.longest]
    return Tiles(
        request=request,
        first_token=start + first - begin,
        num_tokens=(end - first).clamp(min=0),
        past_blocks=past,
        reads=_reads(past, rule),
        end=end,
        group_first=group_first,
        group_tiles=group_tiles,
        slot=slot,
        scoring=scoring,
        context_start=context_start,
        context_tokens=int(room.sum()),
        max_blocks=max(-(-length // block) for length in prompts.longest),
        max_past_blocks=max(pasts),
        max_reads=max(max(rule.most_blocks(past), min(past, -(-rule.dense_tokens // block))) for past in pasts),
    )


def _within(counts: torch.Tensor) -> torch.Tensor:
    """Numbers the members of consecutive sets of these sizes, each from 0."""
    return torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)


def _reads(past: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """Returns `Tiles.reads` for some numbers of past blocks."""
    if rule.is_dense:
        return past.clone()
    fewest = torch.full_like(past, rule.fewest_blocks)
    share = fewest if rule.is_adaptive else (past.double() * rule.density).ceil().to(past.dtype)
    reads = torch.minimum(torch.maximum(share, fewest), past)
    return torch.where(past * rule.block_tokens < rule.dense_tokens, past, reads)
