"""The place of page statistics: extra rows at the end of each cache block and KV head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from sparse_kernels.page_statistics.kinds import KINDS, StatisticsKind
from sparse_kernels.page_statistics.kinds.base import RecordFormat
from sparse_kernels.paging import memory_of

_VECTOR_DTYPE: dict[RecordFormat, torch.dtype] = {
    "int2": torch.uint8,
    "int4": torch.uint8,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
}
_SCALAR_DTYPE = torch.bfloat16
LARGEST: dict[torch.dtype, float] = {torch.int8: 126.0, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}
"""Largest magnitude of an 8-bit element. A vector's scale maps its largest element to it."""
FEW_SLOTS = 512
"""Most slots of a cache write that a GPU splits into small programs. Triton compiles one kernel for these, and one for
more slots."""


def _rows_of(table: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Returns the rows of some blocks, ordered by head: `[num_kv_heads, len(blocks) * pages_per_block, ...]`."""
    # torch cannot gather 8-bit floats, but it can gather their bits.
    bits = torch.uint8 if table.dtype == torch.float8_e4m3fn else table.dtype
    picked = table.view(bits).transpose(0, 1).index_select(1, blocks)
    return picked.view(table.dtype).flatten(1, 2)


@dataclass(frozen=True)
class PageStatistics:
    """Statistics of every page of a cache, as views into its blocks."""

    kind: StatisticsKind
    """The meaning of the numbers."""
    vectors: torch.Tensor
    """`[num_blocks, num_kv_heads, pages_per_block, kind.vectors * head_size]`, int8, float8_e4m3fn or bfloat16: the
    vectors of a record one after the other, divided by their scales if they have scales. For a kind with codes:
    `[num_blocks, num_kv_heads, pages_per_block, kind.codes.rows * head_size]` uint8, see `Codes`; for a leveled kind
    `[num_blocks, num_kv_heads, pages_per_block, kind.codes.rows, head_size / 2]`, where row r of all pages of a block
    lies before row r + 1."""
    scales: torch.Tensor | None
    """`[num_blocks, num_kv_heads, pages_per_block, kind.vectors]` bfloat16, or the steps of `kind.codes.rows`; None for
    bf16 vectors."""
    spread: torch.Tensor | None
    """`[num_blocks, num_kv_heads, pages_per_block]` bfloat16; None for a kind without a spread."""

    @property
    def head_size(self) -> int:
        """Elements of a vector."""
        stored = self.vectors.shape[3:].numel()
        return stored // (self.kind.codes.record_bytes(1) if self.kind.codes else self.kind.vectors)

    @property
    def vector_bytes(self) -> int:
        """Bytes of the vectors of a record."""
        return self.vectors.shape[3:].numel() * self.vectors.element_size()

    @property
    def row_stride(self) -> int:
        """Bytes from a row of a record's codes to the next; 0 without codes."""
        if not self.kind.codes:
            return 0
        return self.vectors.stride(3) if self.kind.is_leveled else self.head_size

    @property
    def pages_per_block(self) -> int:
        """Pages in one cache block."""
        return self.vectors.shape[2]

    def records(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Copies the records of every page of some blocks, head by head.

        Args:
            blocks: `[num_blocks]` int64, physical block ids.

        Returns:
            Vectors `[num_kv_heads, num_pages, kind.vectors, head_size]` in units of their scales; scales
            `[num_kv_heads, num_pages, kind.vectors]`, None if the vectors have none; and the spread
            `[num_kv_heads, num_pages]`, None for a kind without a spread. All float32.
        """
        vectors, scales, spread = (
            None if part is None else _rows_of(part, blocks) for part in (self.vectors, self.scales, self.spread)
        )
        assert vectors is not None
        codes = self.kind.codes
        vectors = codes.unpack(vectors.flatten(2)) if codes else vectors.float().unflatten(-1, (self.kind.vectors, -1))
        if scales is not None:
            scales = scales.float().repeat_interleave(self.kind.vectors // scales.shape[2], dim=2)
        return vectors, scales, None if spread is None else spread.float()

    def summaries(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the summary keys and spreads of every page of some blocks.

        Args:
            blocks: `[num_blocks]` int64, physical block ids.

        Returns:
            `[num_kv_heads, num_pages, kind.summary_keys, head_size]` float32 and `[num_kv_heads, num_pages]` float32,
            the spread None for a kind without one.
        """
        vectors, scales, spread = self.records(blocks)
        return self.kind.summary(vectors if scales is None else vectors * scales[..., None], spread)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The existing views among vectors, scales, spread."""
        return tuple(part for part in (self.vectors, self.scales, self.spread) if part is not None)

    @cached_property
    def by_head(self) -> PageStatistics:
        """The same statistics with the blocks of every KV head numbered separately, see `PagedTensor.by_head`."""
        vectors, scales, spread = (
            None if part is None else part.view(-1, 1, *part.shape[2:])
            for part in (self.vectors, self.scales, self.spread)
        )
        assert vectors is not None
        return replace(self, vectors=vectors, scales=scales, spread=spread)

    @cached_property
    def memory(self) -> tuple[Any, Any, Any]:
        """The memory of vectors, scales and spread (see `memory_of`), for 8-bit formats.

        Without a spread, the memory of the scales takes its place: finite numbers, which are multiplied by zero.
        """
        assert self.scales is not None
        scales = memory_of(self.scales)
        return memory_of(self.vectors), scales, scales if self.spread is None else memory_of(self.spread)


@dataclass(frozen=True)
class StatisticsLayout:
    """Bytes of one page's record, and rows of the cache that the records of a block take.

    The end of a block holds `unit_rows` rows of `2 * head_size` cache elements for every `unit_tokens` tokens. In
    these rows the vectors of all pages come first, then all scales, then all spreads. A scoring kernel then reads long
    runs. Of a leveled kind the first vectors of all pages come first, then all second vectors, and so on.

    Every 16-bit word of these rows is a finite bfloat16. The block may later belong to a layer of another shape.
    Attention kernels multiply stale values by a weight of zero, which hides all values except NaN and infinity.
    """

    page_size: int
    """Tokens per page."""
    head_size: int
    """Elements per key."""
    format: RecordFormat
    """How the vectors of a record are stored."""
    cache_itemsize: int = 2
    """Bytes of one cache element."""
    kind: StatisticsKind = KINDS["mean_and_spread"]
    """Defines the record."""

    def __post_init__(self) -> None:
        if self.format not in self.kind.formats:
            raise ValueError(
                f"format: got {self.format!r}, allowed for {self.kind.name}: {', '.join(self.kind.formats)}"
            )

    @property
    def _vector_bytes(self) -> int:
        if self.kind.codes:
            return self.kind.codes.record_bytes(self.head_size)
        return self.kind.vectors * self.head_size * _VECTOR_DTYPE[self.format].itemsize

    @property
    def _scale_bytes(self) -> int:
        if self.kind.codes:
            scales = 0 if self.kind.codes.dropped else self.kind.codes.rows
        else:
            scales = 0 if self.format == "bf16" else self.kind.vectors
        return scales * _SCALAR_DTYPE.itemsize

    @property
    def record_bytes(self) -> int:
        """Bytes of one page's vectors, scales and spread."""
        return self._vector_bytes + self._scale_bytes + self.kind.has_spread * _SCALAR_DTYPE.itemsize

    @property
    def unit_tokens(self) -> int:
        """Tokens that share a whole number of rows; a block holds a multiple of this.

        Records of two 8-token pages fit one row of a two-byte cache if each holds one 8-bit vector or codes. Other
        records share rows over more tokens. Two bf16 vectors, or two records of two 8-bit vectors, share rows over 64
        tokens: at head size 128, means then take 7.8 % instead of 12.5 %. In a one-byte cache rows have half the bytes,
        so 8-bit records share rows over 256 tokens: 6.6 %.
        """
        small = 2 * self._vector_bytes <= self.head_size * self.cache_itemsize
        exact = self.kind.codes is not None and self.record_bytes == self._vector_bytes
        if small or exact:
            return max(16, self.page_size)
        return 64 if self.cache_itemsize > 1 else 256

    @property
    def unit_rows(self) -> int:
        """Rows of `2 * head_size` cache elements that the records of `unit_tokens` tokens take."""
        row_bytes = 2 * self.head_size * self.cache_itemsize
        records = self.unit_tokens // self.page_size * self.record_bytes
        return -(-records // row_bytes)

    @property
    def tokens_per_row(self) -> Fraction:
        """Tokens per stored row, keys and statistics together; below 1."""
        return Fraction(self.unit_tokens, self.unit_tokens + self.unit_rows)

    @property
    def memory_overhead(self) -> float:
        """Bytes of statistics rows divided by bytes of keys and values."""
        return self.unit_rows / self.unit_tokens

    def rows(self, block_size: int) -> int:
        """Returns the statistics rows at the end of a block of `block_size` tokens.

        Raises:
            ValueError: if the block does not hold a whole number of units.
        """
        if block_size % self.unit_tokens:
            raise ValueError(
                f"block_size: got {block_size}, allowed: a multiple of {self.unit_tokens} "
                f"({self.format} statistics, pages of {self.page_size} tokens"
                f"{', a one-byte cache' if self.cache_itemsize == 1 else ''})"
            )
        return block_size // self.unit_tokens * self.unit_rows

    def views(self, rows: torch.Tensor, block_size: int) -> PageStatistics:
        """Makes typed views of the statistics rows of every block.

        Args:
            rows: `[num_blocks, num_kv_heads, self.rows(block_size), 2 * head_size]` in the cache's dtype, the last
                two dimensions contiguous.
            block_size: tokens per block.

        Returns:
            Views that alias `rows`.
        """
        pages = block_size // self.page_size
        raw = rows.flatten(2).view(torch.uint8)
        vectors, scales, spread = (
            raw[..., start * pages : stop * pages]
            for start, stop in pairwise(
                (0, self._vector_bytes, self._vector_bytes + self._scale_bytes, self.record_bytes)
            )
        )
        stored = vectors.view(_VECTOR_DTYPE[self.format]).unflatten(-1, (pages, -1))
        steps: torch.Tensor | None = None
        if self.kind.is_leveled:
            assert self.kind.codes is not None
            stored = vectors.unflatten(-1, (self.kind.codes.rows, pages, -1)).transpose(2, 3)
            return PageStatistics(self.kind, stored, stored.view(_SCALAR_DTYPE)[..., 0], None)
        if self._scale_bytes:
            steps = scales.view(_SCALAR_DTYPE).unflatten(-1, (pages, -1))
        elif self.kind.codes:
            steps = stored.view(_SCALAR_DTYPE).unflatten(-1, (self.kind.codes.rows, -1))[..., 0]
        return PageStatistics(self.kind, stored, steps, spread.view(_SCALAR_DTYPE) if self.kind.has_spread else None)
