"""Sequences that lie one after the other in the rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch


class Sequence(NamedTuple):
    """The place of a sequence and of its complete pages."""

    begin: int
    """Its first token in the batch."""
    length: int
    """Its number of tokens."""
    first_page: int
    """Its first complete page, counted over all sequences."""
    num_pages: int
    """Its number of complete pages."""


class Tiles(NamedTuple):
    """Pieces of sequences, one per program: `[num_tiles]` int32, in the order of their tokens."""

    start: torch.Tensor
    """The piece's first position in its sequence."""
    begin: torch.Tensor
    """The first token of its sequence."""
    length: torch.Tensor
    """The tokens of its sequence."""
    first_page: torch.Tensor
    """The first complete page of its sequence."""


@dataclass(frozen=True)
class Packing:
    """The lengths of the sequences of a batch. Pages begin with a sequence. Tokens attend within their sequence."""

    lengths: tuple[int, ...]
    """Tokens of each sequence, at least one."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    def num_pages(self, page_size: int) -> int:
        """Returns the complete pages of all sequences."""
        return sum(length // page_size for length in self.lengths)

    def sequences(self, page_size: int) -> list[Sequence]:
        """Returns the place of each sequence, with its complete pages counted over all sequences."""
        pages = [length // page_size for length in self.lengths]
        begins, first_pages = ([0, *accumulate(counts)][:-1] for counts in (self.lengths, pages))
        return [Sequence(*each) for each in zip(begins, self.lengths, first_pages, pages, strict=True)]

    def page_tokens(self, page_size: int, device: torch.device) -> torch.Tensor:
        """Returns the tokens of each complete page: `[num_pages, page_size]` int64."""
        return _page_tokens(self, page_size, device)

    def page_starts(self, page_size: int, device: torch.device) -> torch.Tensor:
        """Returns the first token of each page, incomplete pages included, then `num_tokens`: int32."""
        return _page_starts(self, page_size, device)

    def tiles(self, tokens: int, page_size: int, device: torch.device) -> Tiles:
        """Returns the sequences in pieces of `tokens` tokens."""
        return _tiles(self, tokens, page_size, device)


# Every layer of a step asks for the same tiles.
@lru_cache(maxsize=8)
def _page_tokens(packing: Packing, page_size: int, device: torch.device) -> torch.Tensor:
    firsts = [
        torch.arange(begin, begin + pages * page_size, page_size) for begin, _, _, pages in packing.sequences(page_size)
    ]
    return (torch.cat(firsts)[:, None] + torch.arange(page_size)).to(device)


@lru_cache(maxsize=8)
def _page_starts(packing: Packing, page_size: int, device: torch.device) -> torch.Tensor:
    starts = [torch.arange(begin, begin + length, page_size) for begin, length, _, _ in packing.sequences(page_size)]
    return torch.cat([*starts, torch.tensor([packing.num_tokens])]).to(device, torch.int32)


@lru_cache(maxsize=16)
def _tiles(packing: Packing, tokens: int, page_size: int, device: torch.device) -> Tiles:
    parts = []
    for begin, length, first_page, _ in packing.sequences(page_size):
        start = torch.arange(0, length, tokens)
        parts.append(torch.stack([start, *(torch.full_like(start, x) for x in (begin, length, first_page))]))
    return Tiles(*torch.cat(parts, dim=1).to(device, torch.int32).unbind())
