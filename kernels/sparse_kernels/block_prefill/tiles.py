"""Cuts the prompts of a batch into tiles, without asking the device for their lengths."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_kernels.batch import Prompts
from sparse_kernels.block_prefill.rule import BlockRule


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
    max_past_blocks: int
    """An upper bound of `past_blocks`."""
    max_reads: int
    """An upper bound of the past blocks that a tile reads."""

    def __len__(self) -> int:
        return len(self.request)

    def query_rows(self, num_kv_heads: int) -> torch.Tensor:
        """Returns where the queries of each tile and KV head begin once they are grouped by tile, then by KV head.

        Returns:
            `[num_tiles * num_kv_heads + 1]` int32, in rows of a group of query heads; the last one is their number.
        """
        head = torch.arange(num_kv_heads, dtype=torch.int32, device=self.request.device)
        begin = self.first_token[:, None] * num_kv_heads + self.num_tokens[:, None] * head
        end = (self.first_token[-1:] + self.num_tokens[-1:]) * num_kv_heads
        return torch.cat([begin.flatten(), end])


def tiles_at_most(query_tokens: int, tile_tokens: int) -> int:
    """Returns how many tiles a chunk of so many tokens has at most, wherever it begins."""
    return (query_tokens + tile_tokens - 2) // tile_tokens + 1 if query_tokens else 0


def plan_tiles(prompts: Prompts, rule: BlockRule) -> Tiles:
    """Cuts a batch of prompts into tiles. The host does not wait for the device.

    Raises:
        ValueError: if there are no tokens.
    """
    if not prompts.num_tokens:
        raise ValueError("query_lens: got no tokens, allowed: at least one")
    tile, block = rule.tile_tokens, rule.block_tokens
    counts = torch.tensor([tiles_at_most(length, tile) for length in prompts.query_lens])
    request = torch.repeat_interleave(counts)
    index = torch.arange(len(request)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    known = torch.stack([request, index]).to(torch.int32)
    if prompts.seq_lens.is_cuda:
        known = known.pin_memory().to(prompts.seq_lens.device, non_blocking=True)
    request, index = known
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
        max_past_blocks=max(pasts),
        max_reads=max(max(rule.most_blocks(past), min(past, -(-rule.dense_tokens // block))) for past in pasts),
    )


def _reads(past: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """Returns `Tiles.reads` for some numbers of past blocks."""
    if rule.is_dense:
        return past.clone()
    fewest = torch.full_like(past, rule.fewest_blocks)
    share = fewest if rule.is_adaptive else (past.double() * rule.density).ceil().to(past.dtype)
    reads = torch.minimum(torch.maximum(share, fewest), past)
    return torch.where(past * rule.block_tokens < rule.dense_tokens, past, reads)
