"""Where the statistics of a page lie: extra rows at the end of each cache block and KV head."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch

from sparse_kernels.paging import memory_of

StatisticsFormat = Literal["int8", "fp8", "bf16"]
STATISTICS_FORMATS: tuple[StatisticsFormat, ...] = get_args(StatisticsFormat)

_MEAN_DTYPE: dict[StatisticsFormat, torch.dtype] = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
}
_SCALAR_DTYPE = torch.bfloat16
LARGEST_MEAN: dict[torch.dtype, float] = {torch.int8: 126.0, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}
"""Largest magnitude of an 8-bit mean; what the page's scale maps its largest element to."""


class _Views(NamedTuple):
    mean: torch.Tensor
    scale: torch.Tensor | None
    std: torch.Tensor


class PageStatistics(_Views):
    """Statistics of every page of a cache, as views into its blocks (UNIQUE, Eq. 1-2).

    mean: `[num_blocks, num_kv_heads, pages_per_block, head_size]`, int8, float8_e4m3fn or bfloat16: the mean key,
        divided by `scale` where there is one.
    scale: `[num_blocks, num_kv_heads, pages_per_block]` bfloat16; None for bf16 means.
    std: `[num_blocks, num_kv_heads, pages_per_block]` bfloat16: L2 norm over the head of the per-dimension population
        standard deviation.
    """

    @cached_property
    def memory(self) -> tuple[Any, Any, Any]:
        """The memory of mean, scale and std (see `memory_of`), for formats that have all three."""
        assert self.scale is not None
        return memory_of(self.mean), memory_of(self.scale), memory_of(self.std)


@dataclass(frozen=True)
class StatisticsLayout:
    """Bytes of one page's record, and how many rows of the cache the records of a block take.

    Every `unit_tokens` tokens of a block are followed, at the block's end, by `unit_rows` rows of
    `2 * head_size` cache elements. Within those rows all means of the block come first, then all scales, then all
    standard deviations, so that a scoring kernel reads long runs.

    Every 16-bit word written there is a finite bfloat16. The block's memory may next belong to a layer of another
    shape, and attention kernels multiply stale values by a weight of zero, which hides everything but NaN and
    infinity.
    """

    page_size: int
    """Tokens per page."""
    head_size: int
    """Elements per key."""
    format: StatisticsFormat
    """How the mean key is stored."""
    cache_itemsize: int = 2
    """Bytes of one cache element."""

    @property
    def record_bytes(self) -> int:
        """Bytes of one page's mean, scale and standard deviation."""
        scalars = 1 if self.format == "bf16" else 2
        return self.head_size * _MEAN_DTYPE[self.format].itemsize + scalars * _SCALAR_DTYPE.itemsize

    @property
    def unit_tokens(self) -> int:
        """Tokens that share a whole number of rows; a block holds a multiple of this.

        8-bit records of two 8-token pages fit one row of a two-byte cache. Two bf16 means do not, nor do 8-bit
        records in a one-byte cache, so those share rows over 64 tokens: 7.8 % instead of 12.5 % at head size 128.
        """
        return 64 if self.format == "bf16" or self.cache_itemsize == 1 else max(16, self.page_size)

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
        """Bytes of statistics rows over bytes of keys and values."""
        return self.unit_rows / self.unit_tokens

    def rows(self, block_size: int) -> int:
        """Statistics rows at the end of a block of `block_size` tokens.

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
        """Typed views of the statistics rows of every block.

        Args:
            rows: `[num_blocks, num_kv_heads, self.rows(block_size), 2 * head_size]` in the cache's dtype, the last
                two dimensions contiguous.
            block_size: tokens per block.

        Returns:
            Views that alias `rows`.
        """
        pages = block_size // self.page_size
        raw = rows.flatten(2).view(torch.uint8)
        mean_dtype = _MEAN_DTYPE[self.format]
        mean_bytes = pages * self.head_size * mean_dtype.itemsize
        mean = raw[..., :mean_bytes].view(mean_dtype).unflatten(-1, (pages, self.head_size))
        scalars = [
            raw[..., start : start + pages * _SCALAR_DTYPE.itemsize].view(_SCALAR_DTYPE)
            for start in range(mean_bytes, pages * self.record_bytes, pages * _SCALAR_DTYPE.itemsize)
        ]
        if self.format == "bf16":
            return PageStatistics(mean, None, scalars[0])
        return PageStatistics(mean, *scalars)
