"""Rules: how the queries of a tile score the blocks before it, and how many of them the tile then reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from research.prefill.summaries import BLOCK, Summary


@dataclass(frozen=True, eq=False)
class Tiles:
    """Consecutive tiles of several prompts that begin at the same position."""

    query: torch.Tensor
    """`[num_prompts, num_kv_heads, group, num_tiles, tile, head_size]` float32, anything where there is no token."""
    exists: torch.Tensor
    """`[num_prompts, num_tiles, tile]` bool: whether the prompt has a token there. A prompt's tokens come first."""
    start: int
    """Position of the first tile's first token, a multiple of the tile."""

    @property
    def size(self) -> int:
        """Tokens of a tile."""
        return self.query.shape[4]

    @property
    def past_blocks(self) -> torch.Tensor:
        """`[num_tiles]` int64: blocks before each tile."""
        first = torch.arange(self.query.shape[3], device=self.query.device) * self.size + self.start
        return first // BLOCK

    def part(self, begin: int, end: int) -> Tiles:
        """The tiles from `begin` to `end`."""
        return Tiles(self.query[:, :, :, begin:end], self.exists[:, begin:end], self.start + begin * self.size)


@dataclass(frozen=True)
class Queries:
    """Which queries of a tile speak for it."""

    kind: Literal["every", "mean", "random"] = "every"
    stride: int = 1
    """Of `every`: one of so many, counted from the tile's newest token backwards, so that it is always asked."""
    from_oldest: bool = False
    """Of `every`: whether to count from the tile's oldest token instead."""
    count: int = 8
    """Of `random`: how many."""
    int8: bool = False
    """Whether a query is rounded to 127 steps of its largest element."""

    @property
    def label(self) -> str:
        """Name in result files."""
        name = {
            "every": f"s{self.stride}{'-oldest' * self.from_oldest}", "mean": "mean", "random": f"random{self.count}",
        }[self.kind]  # fmt: skip
        return name + "-int8" * self.int8

    def of(self, tiles: Tiles, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The queries that speak.

        Args:
            tiles: of all queries.
            generator: on the CPU, for `random`.

        Returns:
            Queries `[num_prompts, num_kv_heads, group, num_tiles, asked, head_size]`, whether each exists
            `[num_prompts, num_tiles, asked]`, and its position `[num_prompts, num_tiles, asked]`; of the mean query the
            position before the tile.
        """
        query, exists, size = tiles.query, tiles.exists, tiles.size
        first = tiles.start + torch.arange(exists.shape[1], device=query.device)[:, None] * size
        if self.kind == "mean":
            there = exists[:, None, None, :, :, None]
            total = torch.where(there, query, 0.0).sum(dim=4, keepdim=True)
            asked = total / there.sum(dim=4, keepdim=True).clamp(min=1)
            exists, position = exists.any(dim=2, keepdim=True), (first - 1).expand(len(exists), -1, 1)
        else:
            index = self._index(exists, generator)
            exists = (index >= 0) & (index < size)
            exists = exists & tiles.exists.gather(2, index.clamp(0, size - 1))
            index = index.clamp(0, size - 1)
            position = first + index
            where = index[:, None, None, :, :, None].expand(*query.shape[:4], -1, query.shape[5])
            asked = query if index.shape[2] == size else query.gather(4, where)
            if index.shape[2] == size:
                exists, position = tiles.exists, first + torch.arange(size, device=query.device)
                position = position.expand_as(exists)
        if self.int8:
            step = asked.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
            asked = (asked / step).round() * step
        return asked, exists, position

    def _index(self, exists: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Which tokens of each tile are asked, `[num_prompts, num_tiles, asked]`; negative for none."""
        size = exists.shape[2]
        if self.kind == "random":
            drawn = torch.rand(exists.shape, generator=generator).to(exists.device)
            return torch.where(exists, drawn, -1.0).topk(min(self.count, size), dim=2).indices
        step = torch.arange(0, size, self.stride, device=exists.device)
        if self.from_oldest:
            return step.expand(*exists.shape[:2], -1)
        return exists.sum(dim=2, keepdim=True) - 1 - step


@dataclass(frozen=True)
class Rule:
    """How blocks are scored, one number for each tile, KV head and block."""

    summary: Summary
    weight: float = 1.0
    """Of the spread: lambda."""
    form: Literal["score", "mass", "peak", "best"] = "score"
    """`score`: the largest product over the queries, the heads of the group and the pages of the block. `mass`: the sum
    over queries and heads of the block's share of the softmax over pages. `peak`: the largest of these shares.
    `best`: as `mass`, but a block's part in the softmax is that of its best page's best vector alone."""
    queries: Queries = Queries()
    over: Literal["past", "seen"] = "seen"
    """What a query's softmax is over: the pages before the tile, or also those of the tile that are complete for it."""

    @property
    def label(self) -> str:
        """Name in result files."""
        parts = [
            self.summary.label,
            f"{self.weight:g}",
            self.form + "-past" * (self.over == "past"),
            self.queries.label,
        ]
        return "/".join(parts)

    def score(
        self, tiles: Tiles, vectors: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores blocks for tiles that have a block before them.

        Args:
            tiles: their queries.
            vectors: `[num_prompts, num_kv_heads, num_pages, num_vectors, num_features]`: summaries of the pages up to
                the end of the last tile; those that are not complete do not count.
            generator: on the CPU, for random queries.

        Returns:
            `[num_prompts, num_tiles, num_kv_heads, num_blocks]` float32, -inf for blocks that are not before the tile;
            and of a mass what the tile's own pages have, `[num_prompts, num_tiles, num_kv_heads]`.
        """
        asked, exists, position = self.queries.of(tiles, generator)
        head_size = asked.shape[-1]
        first = tiles.start + torch.arange(exists.shape[1], device=asked.device) * tiles.size
        past = self.form == "score" or self.over == "past" or self.queries.kind == "mean"
        limit = first[:, None].expand_as(position) if past else torch.where(exists, position + 1, first[:, None])
        num_tiles, page = exists.shape[1], self.summary.page_size
        end = tiles.start + (num_tiles - past) * tiles.size
        pages = end // page
        kept = vectors[:, :, :pages]
        features = self.summary.features(asked, self.weight).flatten(2, 4)
        logits = (features @ kept.flatten(2, 3).transpose(2, 3)).unflatten(2, asked.shape[2:5])
        logits = logits.unflatten(-1, (pages, -1))  # [prompts, heads, group, tiles, asked, pages, vectors]
        complete = torch.arange(1, pages + 1, device=asked.device) * page
        hidden = (complete > limit.unsqueeze(-1))[:, None, None, ..., None]
        there = exists[:, None, None]
        per_block = BLOCK // page
        if self.form == "score":
            best = logits.amax(dim=-1).masked_fill_(hidden.squeeze(-1) | ~there.unsqueeze(-1), -torch.inf)
            best = best.amax(dim=(2, 4)).unflatten(-1, (-1, per_block)).amax(dim=-1).transpose(1, 2)
            return best, best.new_zeros(best.shape[:-1])
        logits = (logits / math.sqrt(head_size)).masked_fill_(hidden, -torch.inf).flatten(-2)
        of_block = (-1, per_block * vectors.shape[3])
        if self.form == "best":
            shares = logits.unflatten(-1, of_block).amax(dim=-1).softmax(dim=-1) * there.unsqueeze(-1)
        else:
            shares = logits.softmax(dim=-1).unflatten(-1, of_block).sum(dim=-1) * there.unsqueeze(-1)
        of_tile = shares.amax(dim=(2, 4)) if self.form == "peak" else shares.sum(dim=(2, 4))
        of_tile = of_tile.transpose(1, 2)
        before = torch.arange(of_tile.shape[-1], device=asked.device) < first[:, None, None] // BLOCK
        own = of_tile.masked_fill(before, 0.0).sum(dim=-1)
        return of_tile.masked_fill(~before, -torch.inf), own


@dataclass(frozen=True)
class Newest:
    """Scores blocks by their age: what a window is good for."""

    @property
    def label(self) -> str:
        """Name in result files."""
        return "newest"


@dataclass(frozen=True)
class Density:
    """A tile reads a share of the blocks before it, the first and the previous one among them."""

    share: float
    floor: int = 4
    """Blocks that are read in any case, where there are so many."""

    @property
    def label(self) -> str:
        """Name in result files."""
        return f"d{self.share:g}f{self.floor}"

    def keep(self, ranked: torch.Tensor, own: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        """Which ranks are read.

        Args:
            ranked: `[num_prompts, num_tiles, num_kv_heads, num_blocks]`: scores, best block first.
            own: `[num_prompts, num_tiles, num_kv_heads]`: the mass of the tile's own pages.
            past: `[num_tiles]`: blocks before each tile.

        Returns:
            Bool, of the shape of `ranked` or one that expands to it.
        """
        count = torch.ceil(past.double() * self.share - 1e-9).long().clamp(min=self.floor)
        return torch.arange(ranked.shape[-1], device=ranked.device) < count[:, None, None]


@dataclass(frozen=True)
class Coverage:
    """A tile reads the fewest blocks that hold a share of its mass together with its own."""

    share: float
    floor: int = 4
    """Blocks that are read in any case, where there are so many."""

    @property
    def label(self) -> str:
        """Name in result files."""
        return f"c{self.share:g}f{self.floor}"

    def keep(self, ranked: torch.Tensor, own: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        """See `Density.keep`; the scores are masses."""
        mass = ranked.clamp(min=0.0)
        before = own.unsqueeze(-1) + mass.cumsum(dim=-1) - mass
        total = own.unsqueeze(-1) + mass.sum(dim=-1, keepdim=True)
        return (before < self.share * total) | (torch.arange(ranked.shape[-1], device=ranked.device) < self.floor)


def choose(scores: torch.Tensor, own: torch.Tensor, past: torch.Tensor, choice: Density | Coverage) -> torch.Tensor:
    """The blocks that a tile reads: the first, the previous one, and the best of the others.

    Args:
        scores: `[num_prompts, num_tiles, num_kv_heads, num_blocks]` float32.
        own: `[num_prompts, num_tiles, num_kv_heads]`: of masses, what the tile's own pages have.
        past: `[num_tiles]`: blocks before each tile; only those are chosen.
        choice: how many.

    Returns:
        Bool of the shape of `scores`. Ties go to the lowest block.
    """
    block = torch.arange(scores.shape[-1], device=scores.device)
    exists = block < past[:, None, None]
    always = ((block == 0) | (block == past[:, None, None] - 1)) & exists
    rank_by = scores.masked_fill(~exists, -torch.inf).masked_fill(always, torch.inf)
    order = rank_by.sort(dim=-1, descending=True, stable=True).indices
    keep = choice.keep(scores.masked_fill(~exists, -torch.inf).gather(-1, order), own, past)
    chosen = torch.zeros_like(rank_by, dtype=torch.bool).scatter(-1, order, keep.expand_as(rank_by))
    return (chosen | always) & exists


@dataclass(frozen=True)
class Setting:
    """A sparse prefill. Without a rule: a dense one."""

    rule: Rule | Newest | None = None
    choice: Density | Coverage = Density(0.1)
    tile: int = BLOCK

    @property
    def name(self) -> str:
        """Unique among settings, for result files."""
        return "dense" if self.rule is None else f"{self.rule.label}/t{self.tile}/{self.choice.label}"


@dataclass(frozen=True)
class ZipVL:
    """ZipVL (arXiv 2410.08584): one set T of tokens for a layer; Q[T] attends K[T], other outputs are zero.

    Probe rows i give A = softmax(Q_probe K^T / sqrt(D)), summed over heads; a_j is the sum of column j. p is the fewest
    tokens whose largest a_j reach tau of the sum of all, and T are the p tokens with the largest a_j over the number
    of probe rows that see j. The last prompt token is always in T.
    """

    tau: float | None = 0.975
    share: float | None = None
    """p as a share of the prompt, in place of what follows from tau."""
    newest_probes: int = 64
    random_probes: int = 64

    @property
    def name(self) -> str:
        """Unique among settings, for result files."""
        size = f"tau{self.tau:g}" if self.share is None else f"p{self.share:g}"
        return f"zipvl/{size}/{self.newest_probes}+{self.random_probes}"

    def probes(self, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
        """Positions of the probe rows of a prompt, ascending."""
        newest = min(self.newest_probes, num_tokens)
        drawn = torch.randperm(num_tokens - newest, generator=generator)[: self.random_probes]
        return torch.cat([drawn.sort().values, torch.arange(num_tokens - newest, num_tokens)])

    def keep(self, query: torch.Tensor, keys: torch.Tensor, probes: torch.Tensor) -> torch.Tensor:
        """The tokens of T.

        Args:
            query: `[num_kv_heads, group, num_probes, head_size]` float32, of the probe rows.
            keys: `[num_kv_heads, num_tokens, head_size]` float32, of the prompt.
            probes: `[num_probes]` int64, their positions.

        Returns:
            `[size of T]` int64, ascending.
        """
        num_tokens = keys.shape[1]
        token = torch.arange(num_tokens, device=keys.device)
        logits = query @ keys.unsqueeze(1).transpose(2, 3) / math.sqrt(keys.shape[2])
        shares = logits.masked_fill(token > probes[:, None], -torch.inf).softmax(dim=-1)
        total = shares.sum(dim=(0, 1, 2)).double()
        seen = (token <= probes[:, None]).sum(dim=0)
        if self.share is None:
            assert self.tau is not None
            running = total.sort(descending=True).values.cumsum(dim=0)
            count = int((running < self.tau * running[-1]).sum()) + 1
        else:
            count = math.ceil(self.share * num_tokens)
        normalised = (total / seen.clamp(min=1)).index_fill(0, token[-1:], torch.inf)
        return normalised.topk(min(count, num_tokens)).indices.sort().values
