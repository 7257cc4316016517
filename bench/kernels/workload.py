"""Tensors of the cases: one large cache for all cases, and random scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from sparse_kernels.batch import DecodeBatch, PrefillBatch, Prompts, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_statistics import PageStatistics
from sparse_kernels.page_statistics.reference import update_page_statistics
from sparse_kernels.paging import PagedTensor

from bench.kernels.cases import Case, DecodeCase, Geometry, PrefillCase, Statistics, TopKCase

_FILL_BLOCKS = 1024
"""Blocks filled at a time. Computing their statistics takes a few hundred megabytes."""
_NEEDLE_LENGTH = 10.0
"""Distance that a needle's keys move towards the query. Random scores at 128 dimensions have a standard deviation of
about 4 and a needle gains 110, so rounding cannot change the selection."""
_RECENT_LENGTH = 3.0
"""Factor between a query and its newest key. At 128 dimensions that key has a logit of about 34. 512K other keys, with
logits of standard deviation 3, have a total weight of exp(18)."""


@dataclass(frozen=True)
class DecodeInputs:
    """One decode step. Keys, values and query are views of the model's fused projection, strided as in vLLM."""

    case: DecodeCase
    geometry: Geometry
    token_rows: torch.Tensor
    """`[num_blocks, num_kv_heads, block_size, 2 * head_size]`: the cache without its statistics rows."""
    keys: PagedTensor
    values: PagedTensor
    statistics: PageStatistics
    block_table: torch.Tensor
    """`[batch, max_blocks]` int32."""
    seq_lens: torch.Tensor
    """`[batch]` int32, the new token included."""
    query: torch.Tensor
    """`[batch, num_query_heads, head_size]` bfloat16."""
    new_keys: torch.Tensor
    """`[batch, num_kv_heads, head_size]`: equal to the cache's contents at the new token's slot, so that repeated
    writes leave the cache unchanged."""
    new_values: torch.Tensor
    slots: torch.Tensor
    """`[batch]` int64, where the new tokens lie."""

    @property
    def cache(self) -> KVCache:
        """Keys, values and statistics."""
        return KVCache(self.keys, self.values, self.statistics)

    @property
    def batch(self) -> DecodeBatch:
        """The requests that decode."""
        return DecodeBatch(self.query, self.block_table, self.seq_lens)

    @property
    def softmax(self) -> Softmax:
        """How logits become weights."""
        return Softmax(self.geometry.scale)

    @property
    def num_pages(self) -> torch.Tensor:
        """Complete pages of each request, `[batch]` int32."""
        return self.seq_lens // self.geometry.page_size

    @property
    def grouped_query(self) -> torch.Tensor:
        """`[batch, num_kv_heads, group, head_size]`."""
        return self.query.view(len(self.query), self.geometry.num_kv_heads, self.case.group, -1)

    @property
    def lengths(self) -> list[int]:
        """`seq_lens` on the host."""
        return self.case.lengths(self.geometry)


@dataclass(frozen=True)
class PrefillInputs:
    """One step of one prompt, whose keys and values are already in the cache. The query is a view as in `DecodeInputs`.

    Keys and queries are random, so the best blocks are random. Their number is not.
    """

    case: PrefillCase
    geometry: Geometry
    token_rows: torch.Tensor
    """See `DecodeInputs`."""
    cache: KVCache
    prompts: Prompts
    query: torch.Tensor
    """`[chunk, num_query_heads, head_size]` bfloat16."""

    @property
    def batch(self) -> PrefillBatch:
        """The prompt with its queries."""
        return self.prompts.batch(self.query)

    @property
    def softmax(self) -> Softmax:
        """How logits become weights."""
        return Softmax(self.geometry.scale)


@dataclass(frozen=True)
class TopKInputs:
    """Scores of pages to select from."""

    case: TopKCase
    geometry: Geometry
    scores: torch.Tensor
    """`[num_tokens, num_kv_heads, pages]` bfloat16, normally distributed."""
    num_pages: torch.Tensor
    """`[num_tokens]` int32, all of them."""
    block_table: torch.Tensor
    """`[num_tokens, blocks]` int32, each row a permutation."""

    @property
    def rows(self) -> torch.Tensor:
        """`[rows, pages]`."""
        return self.scores.flatten(0, 1)


class Workload:
    """Makes the inputs of cases. All decode cases of one format share one cache, filled once."""

    def __init__(self, geometry: Geometry, device: torch.device, max_blocks: int, seed: int = 0) -> None:
        self.geometry = geometry
        self.device = device
        self.max_blocks = max_blocks
        self._generator = torch.Generator(device).manual_seed(seed)
        self._memory = torch.empty(0, dtype=torch.bfloat16, device=device)
        self._cache = self._memory
        self._format: Statistics | None = None
        self._order = torch.randperm(max_blocks, generator=self._generator, device=device).int()

    def fits(self, case: Case) -> bool:
        """Whether the cache holds the blocks of a case."""
        return isinstance(case, TopKCase) or case.blocks(self.geometry) <= self.max_blocks

    def decode_inputs(self, case: DecodeCase) -> DecodeInputs:
        """Inputs of a decode step; its blocks are scattered over the whole cache."""
        self._lay_out(case.format)
        geometry, size = self.geometry, self.geometry.head_size
        token_rows = self._token_rows
        block_table = self._order[: case.blocks(geometry)].view(case.batch, -1).contiguous()
        lengths = torch.tensor(case.lengths(geometry), device=self.device)
        last = lengths - 1
        blocks = block_table.gather(1, (last // geometry.block_size)[:, None]).squeeze(1).long()
        offsets = last % geometry.block_size

        query_size, kv_size = geometry.num_kv_heads * case.group * size, geometry.num_kv_heads * size
        projected = self._normal(case.batch, query_size + 2 * kv_size)
        query, new_keys, new_values = (
            part.unflatten(1, (-1, size)) for part in projected.split([query_size, kv_size, kv_size], dim=1)
        )
        stored = token_rows[blocks, :, offsets]
        new_keys.copy_(stored[..., :size])
        new_values.copy_(stored[..., size:])
        return DecodeInputs(
            case=case,
            geometry=geometry,
            token_rows=token_rows,
            keys=PagedTensor.from_rows(token_rows[..., :size], geometry.page_size),
            values=PagedTensor.from_rows(token_rows[..., size:], geometry.page_size),
            statistics=self._statistics(case.format),
            block_table=block_table,
            seq_lens=lengths.int(),
            query=query,
            new_keys=new_keys,
            new_values=new_values,
            slots=blocks * geometry.block_size + offsets,
        )

    def recent_inputs(self, case: DecodeCase) -> DecodeInputs:
        """A decode step of mostly recent heads: three of four KV heads look for a key among the newest tokens.

        Their queries are a multiple of that key, so large that all other tokens together have less than a millionth of
        the weight. The queries of every fourth head are normally distributed, and attend to everything.
        """
        inputs = self.decode_inputs(case)
        recent = torch.arange(self.geometry.num_kv_heads, device=self.device) % 4 != 3
        query = torch.where(recent[:, None, None], _RECENT_LENGTH * inputs.new_keys[:, :, None], inputs.grouped_query)
        return replace(inputs, query=query.flatten(1, 2).to(inputs.query.dtype))

    def prefill_inputs(self, case: PrefillCase) -> PrefillInputs:
        """Inputs of a step of a prompt; its blocks are scattered over the whole cache."""
        self._lay_out(case.format)
        heads, size = self.geometry.num_kv_heads, self.geometry.head_size
        projected = self._normal(case.chunk, heads * (case.group + 2), size)
        start = torch.tensor([0, case.chunk], dtype=torch.int32, device=self.device)
        length = torch.tensor([case.context], dtype=torch.int32, device=self.device)
        table = self._order[: case.blocks(self.geometry)][None]
        return PrefillInputs(
            case=case,
            geometry=self.geometry,
            token_rows=self._token_rows,
            cache=KVCache.from_rows(self._token_rows, self.geometry.page_size, self._statistics(case.format)),
            prompts=Prompts(start, table, length, (case.chunk,), (case.context,)),
            query=projected[:, : heads * case.group],
        )

    @property
    def _token_rows(self) -> torch.Tensor:
        return self._cache[:, :, : self.geometry.block_size]

    def _statistics(self, statistics: Statistics) -> PageStatistics:
        block_size = self.geometry.block_size
        return self.geometry.layout(statistics).views(self._cache[:, :, block_size:], block_size)

    def topk_inputs(self, case: TopKCase) -> TopKInputs:
        """Random scores, and block tables of matching length."""
        geometry = self.geometry
        tokens = case.rows // geometry.num_kv_heads
        scores = self._normal(tokens, geometry.num_kv_heads, case.pages)
        num_pages = torch.full((tokens,), case.pages, dtype=torch.int32, device=self.device)
        blocks = -(-case.pages // geometry.pages_per_block)
        noise = torch.rand(tokens, blocks, generator=self._generator, device=self.device)
        return TopKInputs(case, geometry, scores, num_pages, noise.argsort(dim=1).int())

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.bfloat16)

    def _lay_out(self, statistics: Statistics) -> None:
        """Fills every block with random keys and values, and computes their statistics."""
        if statistics == self._format:
            return
        geometry = self.geometry
        elements = self.max_blocks * geometry.block_elements(statistics)
        if self._memory.numel() < elements:
            # Freed first: two caches of this size do not fit.
            self._cache = self._memory = self._memory.new_empty(0)
            self._memory = self._memory.new_empty(elements)
        rows = geometry.block_size + geometry.layout(statistics).rows(geometry.block_size)
        shape = (self.max_blocks, geometry.num_kv_heads, rows, 2 * geometry.head_size)
        self._cache = self._memory[:elements].view(shape)
        for begin in range(0, self.max_blocks, _FILL_BLOCKS):
            self._fill(self._cache[begin : begin + _FILL_BLOCKS], statistics)
        self._format = statistics

    def _fill(self, part: torch.Tensor, statistics: Statistics) -> None:
        geometry = self.geometry
        part.normal_(generator=self._generator)
        keys = PagedTensor.from_rows(part[:, :, : geometry.block_size, : geometry.head_size], geometry.page_size)
        views = geometry.layout(statistics).views(part[:, :, geometry.block_size :], geometry.block_size)
        pages = torch.arange(len(part) * geometry.pages_per_block, device=self.device)
        update_page_statistics(keys, views, pages // geometry.pages_per_block, pages % geometry.pages_per_block)


@contextmanager
def needles(inputs: DecodeInputs, requests: list[int]) -> Iterator[None]:
    """Makes the best pages of some requests much better than the rest, so that rounding cannot change the selection.

    Scores are rounded to bfloat16. Several of thousands of random pages then share the last place, and two correct
    implementations with different orders of sums may select differently. In the context, as many pages as the selection
    has room for are moved towards the query. Afterwards the cache is restored.
    """
    geometry, statistics = inputs.geometry, inputs.statistics
    room = geometry.k - geometry.sink_pages - geometry.recent_pages
    blocks, within, directions = [], [], []
    for request in requests:
        complete = int(inputs.num_pages[request])
        free = complete - geometry.sink_pages - geometry.recent_pages
        if free <= room:
            continue
        chosen = torch.randperm(free, device=inputs.query.device)[:room] + geometry.sink_pages
        blocks.append(inputs.block_table[request, chosen // geometry.pages_per_block].long())
        within.append(chosen % geometry.pages_per_block)
        direction = inputs.grouped_query[request, :, 0].float()
        directions.append((direction / direction.norm(dim=-1, keepdim=True)).expand(len(chosen), -1, -1))
    if not blocks:
        yield
        return
    block, page = torch.cat(blocks), torch.cat(within)
    tables = [inputs.keys.view[:, :, :, 0], *map(_bits, statistics.parts)]
    saved = [table[block, :, page] for table in tables]
    moved = saved[0].float() + _NEEDLE_LENGTH * torch.cat(directions)[:, :, None]
    tables[0][block, :, page] = moved.to(saved[0].dtype)
    update_page_statistics(inputs.keys, statistics, block, page)
    try:
        yield
    finally:
        for table, rows in zip(tables, saved, strict=True):
            table[block, :, page] = rows


def _bits(table: torch.Tensor) -> torch.Tensor:
    """Returns bytes of 8-bit floats, which can be indexed; 8-bit floats cannot."""
    return table.view(torch.uint8) if table.dtype == torch.float8_e4m3fn else table
