"""Cuts the prompts of a batch into tiles without reading their lengths from the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sparse_kernels.batch import Prompts
from sparse_kernels.block_prefill.rule import BlockRule

_ROWS_OF_A_GROUP = 128
"""The rows of a scoring group are this number or a multiple of it."""


@dataclass(frozen=True)
class ScoringRows:
    """The rows of queries that are scored together. A row is one token of a tile and one query head of a KV head."""

    rows: int
    """Rows of a tile that score."""
    padded: int
    """Room for the rows of a tile, a power of two."""
    tiles: int
    """Tiles of a group."""

    @classmethod
    def of(cls, rule: BlockRule, group_size: int) -> ScoringRows:
        """Returns the shape for `group_size` query heads per KV head."""
        rows = -(-rule.tile_tokens // rule.query_stride) * group_size
        padded = 1 << (rows - 1).bit_length()
        return cls(rows, padded, max(_ROWS_OF_A_GROUP // padded, 1))

    @property
    def of_group(self) -> int:
        """Rows of a group."""
        return self.padded * self.tiles

    def groups(self, query_tokens: int, rule: BlockRule) -> int:
        """Returns the most groups of a chunk of `query_tokens` tokens."""
        return -(-tiles_at_most(query_tokens, rule.tile_tokens) // self.tiles)


@dataclass(frozen=True)
class Tiles:
    """The tiles of a batch of prompts. The host knows an upper bound on their number; the device knows their positions.

    Tiles follow the order of requests and of tokens. The host does not know whether a chunk begins inside a tile, so
    it plans one tile more. Tiles without tokens are padding.
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
    """`[num_tiles]` int32, past blocks that a tile reads; `past_blocks` if it reads all. Under an adaptive rule the
    smallest number."""
    end: torch.Tensor
    """`[num_tiles]` int32, one past the position of the last token of each tile."""
    group_first: torch.Tensor
    """`[num_groups]` int32, the first tile of each scoring group. A group is consecutive tiles of one request, which
    are scored together because they read the same statistics."""
    group_tiles: torch.Tensor
    """`[num_groups]` int32, how many tiles a group has."""
    slot: torch.Tensor
    """`[num_tiles]` int32, `group * scoring.tiles + place in the group` of each tile."""
    scoring: ScoringRows
    """The shape of a group."""
    context_start: torch.Tensor
    """`[num_requests]` int32, where each context begins if all contexts are laid out one after the other, each rounded
    up to whole blocks."""
    context_tokens: int
    """Tokens of this layout."""
    max_blocks: int
    """An upper bound on a tile's past and own blocks together."""
    max_past_blocks: int
    """An upper bound on `past_blocks`."""
    max_reads: int
    """An upper bound on the past blocks that a tile reads."""
    _rows: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)
    """Results of `query_rows`, which every layer calls."""

    def __len__(self) -> int:
        return len(self.request)

    def query_rows(self, num_kv_heads: int) -> torch.Tensor:
        """Returns where the queries of each tile and KV head begin when ordered by tile, then by KV head.

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
    """Returns the largest number of tiles of a chunk of `query_tokens` tokens, wherever it begins."""
    return (query_tokens + tile_tokens - 2) // tile_tokens + 1 if query_tokens else 0


def plan_tiles(prompts: Prompts, rule: BlockRule, group_size: int) -> Tiles:
    """Cuts a batch of prompts into tiles. The host does not wait for the device.

    Args:
        prompts: the prompts.
        rule: defines the tiles.
        group_size: query heads per KV head.

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
    # The most past blocks of a tile that reads all because of `dense_tokens`.
    most_dense = max(rule.dense_tokens - 1, 0) // block
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
        max_reads=max(max(rule.most_blocks(past), min(past, most_dense)) for past in pasts),
    )


def _within(counts: torch.Tensor) -> torch.Tensor:
    """Numbers the members of consecutive sets of the given sizes, each from 0."""
    return torch.arange(int(counts.sum())) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)


def _reads(past: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """Returns `Tiles.reads` for the given numbers of past blocks."""
    if rule.is_dense:
        return past.clone()
    fewest = torch.full_like(past, rule.fewest_blocks)
    share = fewest if rule.is_adaptive else (past.double() * rule.density).ceil().to(past.dtype)
    reads = torch.minimum(torch.maximum(share, fewest), past)
    return torch.where(past * rule.block_tokens < rule.dense_tokens, past, reads)
