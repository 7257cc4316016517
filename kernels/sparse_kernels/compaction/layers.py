"""The layers and the blocks of an eviction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sparse_kernels.cache import KVCache


@dataclass(frozen=True)
class LayerCaches:
    """The caches of layers of one shape. A block has the same number in all of them."""

    caches: tuple[KVCache, ...]

    def __post_init__(self) -> None:
        """Raises ValueError unless the caches have one shape."""
        shapes = {(c.num_kv_heads, c.head_size, c.page_size, c.keys.pages_per_block) for c in self.caches}
        if len(shapes) != 1:
            raise ValueError(f"caches: got {len(shapes)} shapes, allowed: 1")

    @property
    def first(self) -> KVCache:
        """The cache of the first layer."""
        return self.caches[0]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.first.page_size * self.first.keys.pages_per_block

    @cached_property
    def addresses(self) -> torch.Tensor:
        """`[num_layers]` int64, addresses of `KVCache.rows`.

        Raises:
            ValueError: if a cache does not store one row per token, or strides differ.
        """
        rows = [cache.rows for cache in self.caches]
        if any(each.stride() != rows[0].stride() or each.dtype != rows[0].dtype for each in rows):
            raise ValueError("caches: got different strides or dtypes, allowed: equal ones")
        return torch.tensor([each.data_ptr() for each in rows], device=rows[0].device)

    @property
    def key_scales(self) -> torch.Tensor | None:
        """`[num_layers]` float32, see `KVCache.key_scale`; None for 16-bit caches.

        Each use reads the scales of the layers, because weights may be reloaded.
        """
        scales = [cache.key_scale for cache in self.caches if cache.key_scale is not None]
        return torch.stack([scale.reshape(()) for scale in scales]) if scales else None


@dataclass(frozen=True)
class HeldBlocks:
    """The blocks that a request holds, and those of them that its kept tokens move into.

    Tokens are counted from the first block that is held.
    """

    block_table: torch.Tensor
    """`[max_blocks]` integer, physical block ids, without the blocks that were given back."""
    num_tokens: int
    """Tokens in these blocks."""
    first_block: int
    """The first block that kept tokens move into."""
    end_block: int
    """The end of these blocks. They are full, and so are all blocks before them. Later tokens stay."""
    protected: torch.Tensor | None = None
    """`[num_layers, num_kv_heads, num_tokens]` bool, tokens that are kept before all others; None for none."""

    def check(self, block_size: int) -> None:
        """Raises ValueError if there is nothing to evict, or a block is not full."""
        if not 0 < self.first_block < self.end_block <= self.num_tokens // block_size:
            got = f"{self.first_block} to {self.end_block} of {self.num_tokens} tokens"
            raise ValueError(f"first_block and end_block: got {got}, allowed: full blocks behind the first")
