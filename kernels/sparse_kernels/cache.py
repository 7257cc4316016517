"""The KV cache of a layer, as the operations see it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sparse_kernels.hot_pages.pages import HotPages
from sparse_kernels.page_statistics.layout import PageStatistics
from sparse_kernels.paging import PagedTensor


@dataclass(frozen=True)
class KVCache:
    """Keys, values and page statistics in the same blocks."""

    keys: PagedTensor
    values: PagedTensor
    """The values, with pages of the same size."""
    statistics: PageStatistics | None = None
    """The records of each page's keys; None for a cache without statistics."""
    key_scale: torch.Tensor | None = None
    """One float32: a float8 key times this is the key; None for other caches."""
    value_scale: torch.Tensor | None = None
    """One float32: a float8 value times this is the value; None for other caches."""
    hot: HotPages | None = None
    """On a GPU, copies in device memory of pages in host memory; None for a cache in device memory. No output depends
    on them."""

    @classmethod
    def from_rows(
        cls,
        rows: torch.Tensor,
        page_size: int,
        statistics: PageStatistics | None = None,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
    ) -> KVCache:
        """Returns the cache that stores one row per token: its key, then its value.

        Args:
            rows: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, any strides.
            page_size: tokens per page; divides `block_size`.
            statistics: views of the statistics in the same blocks.
            key_scale: see the field.
            value_scale: see the field.

        Raises:
            ValueError: if `page_size` does not divide the block.
        """
        head_size = rows.shape[-1] // 2
        keys = PagedTensor.from_rows(rows[..., :head_size], page_size)
        values = PagedTensor.from_rows(rows[..., head_size:], page_size)
        return cls(keys, values, statistics, key_scale, value_scale)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.keys.page_size

    @property
    def num_kv_heads(self) -> int:
        """KV heads in the cache."""
        return self.keys.num_kv_heads

    @property
    def head_size(self) -> int:
        """Elements of a key."""
        return self.keys.head_size

    @property
    def by_head(self) -> KVCache:
        """The same cache with the blocks of every KV head numbered separately, see `PagedTensor.by_head`."""
        statistics = None if self.statistics is None else self.statistics.by_head
        return replace(self, keys=self.keys.by_head, values=self.values.by_head, statistics=statistics)

    @property
    def rows(self) -> torch.Tensor:
        """The token rows given to `from_rows`: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, a view.

        Raises:
            ValueError: if the cache does not store one row per token, the key first and then the value.
        """
        keys, values = self.keys.view, self.values.view
        block, head, group, _, token, element = keys.stride() if keys.dim() == 6 else (0,) * 6
        beside = keys.data_ptr() + self.head_size * keys.itemsize == values.data_ptr()
        in_order = self.keys.token_dims == (0,) and keys.shape[3] == 1 and group == self.page_size * token
        if not beside or not in_order or element != 1 or keys.stride() != values.stride():
            raise ValueError("keys and values: got packed blocks, allowed: one row per token, its key and its value")
        shape = len(keys), self.num_kv_heads, self.page_size * self.keys.pages_per_block, 2 * self.head_size
        return keys.as_strided(shape, (block, head, token, 1))

    def scaled_by_keys(self, factor: float) -> float:
        """Returns `factor` times `key_scale`, the factor of logits for keys as they are stored."""
        return factor if self.key_scale is None else factor * float(self.key_scale)

    def check(self) -> None:
        """Raises ValueError unless keys and values have pages of one size."""
        if self.keys.page_size != self.values.page_size:
            raise ValueError(
                f"values: got pages of {self.values.page_size} tokens, allowed: the keys' {self.keys.page_size}"
            )

    def check_rows(self) -> None:
        """Raises ValueError unless the keys of each token are one contiguous row, and so are its values."""
        keys, values = self.keys.view, self.values.view
        if self.keys.token_dims != (0,) or keys.stride(-1) != 1 or keys.stride() != values.stride():
            raise ValueError("keys and values: got packed blocks, allowed on a GPU: one contiguous row per token")
