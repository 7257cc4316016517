"""The correct keys, values and statistics: a separate cache in which requests never share, free or reuse blocks."""

from functools import cached_property

import torch
from sparse_kernels.cache import KVCache
from sparse_kernels.page_statistics import StatisticsLayout
from sparse_kernels.page_statistics.reference import update_page_statistics
from sparse_kernels.paging import PagedTensor
from support.state_fuzz.cases import MAX_MODEL_LEN

VOCABULARY = 1024


class Tokens:
    """Keys and values as functions of a token and its position, so that equal prefixes have equal ones."""

    def __init__(self, num_kv_heads: int, head_size: int, generator: torch.Generator) -> None:
        """Draws the contributions of tokens and positions."""
        shape = num_kv_heads, head_size
        self._tokens = torch.randn(2, VOCABULARY, *shape, generator=generator).bfloat16()
        self._positions = torch.randn(2, MAX_MODEL_LEN, *shape, generator=generator).bfloat16()
        # Real keys have a common direction, and channels of different size.
        self._tokens[0] += 2 * torch.randn(shape, generator=generator).bfloat16()

    def keys_and_values(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of tokens at positions: `[num_tokens, num_kv_heads, head_size]` bfloat16 each."""
        keys, values = self._tokens[:, tokens] + self._positions[:, positions]
        return keys, values


class Truth:
    """A row-major cache with a place for each request, and statistics from the reference."""

    def __init__(
        self, layout: StatisticsLayout | None, heads: tuple[int, int], num_places: int, block_size: int
    ) -> None:
        """Makes a cache for requests of any length, in blocks of the layer's size.

        Args:
            layout: of the statistics; None for none.
            heads: number and size of the KV heads.
            num_places: number of requests.
            block_size: tokens of a block.
        """
        self.block_size, self.page_size = block_size, block_size if layout is None else layout.page_size
        self.blocks_each = -(-MAX_MODEL_LEN // block_size)
        num_kv_heads, head_size = heads
        rows = block_size if layout is None else block_size + layout.rows(block_size)
        memory = torch.zeros(num_places * self.blocks_each, num_kv_heads, rows, 2 * head_size, dtype=torch.bfloat16)
        self._rows = memory[:, :, :block_size]
        self.statistics = None if layout is None else layout.views(memory[:, :, block_size:], block_size)
        self.table = torch.arange(len(memory), dtype=torch.int32).view(num_places, -1)
        """`[num_places, blocks_each]` int32, the blocks of each place."""

    @cached_property
    def cache(self) -> KVCache:
        """Keys, values and statistics in pages."""
        keys, values = self._rows.chunk(2, dim=-1)
        return KVCache(
            PagedTensor.from_rows(keys, self.page_size), PagedTensor.from_rows(values, self.page_size), self.statistics
        )

    def write(self, places: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes tokens in the order of positions at each place, and the statistics of the pages that they complete.

        Args:
            places: `[num_tokens]` int64.
            positions: `[num_tokens]` int64.
            keys: `[num_tokens, num_kv_heads, head_size]`.
            values: like `keys`.
        """
        blocks = places * self.blocks_each + positions // self.block_size
        within = positions % self.block_size
        self._rows[blocks, :, within] = torch.cat([keys, values], dim=-1)
        last = within % self.page_size == self.page_size - 1
        if self.statistics is not None and last.any():
            update_page_statistics(self.cache.keys, self.statistics, blocks[last], within[last] // self.page_size)
