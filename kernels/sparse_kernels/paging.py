"""How keys and values lie in a paged cache, seen page by page whatever the packing of the block."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedTensor:
    """The keys or the values of a block-paged cache, addressable by page.

    A cache block of one KV head holds `block_size` tokens. Attention kernels pack those tokens in an order of
    their own, so a page is rarely one contiguous piece; `view` exposes it without copying and `token_dims` says
    which of its trailing dimensions enumerate tokens, outermost first (the others enumerate the head).
    """

    view: torch.Tensor
    """`[num_blocks, num_kv_heads, page_groups, pages_per_group, *inner]`; page p of a block is
    `[p // pages_per_group, p % pages_per_group]`."""
    token_dims: tuple[int, ...]
    """Indices into `inner` of the dimensions that enumerate the page's tokens."""
    page_size: int
    """Tokens per page."""
    head_size: int
    """Elements per token."""

    @classmethod
    def from_rows(cls, rows: torch.Tensor, page_size: int) -> PagedTensor:
        """Pages of a cache that stores one row per token.

        Args:
            rows: `[num_blocks, num_kv_heads, block_size, head_size]`, any strides.
            page_size: tokens per page; divides `block_size`.

        Raises:
            ValueError: if `page_size` does not divide the block.
        """
        block_size, head_size = rows.shape[2:]
        if block_size % page_size:
            raise ValueError(f"page_size: got {page_size}, allowed: a divisor of the block size {block_size}")
        view = rows.unflatten(2, (block_size // page_size, 1, page_size))
        return cls(view, token_dims=(0,), page_size=page_size, head_size=head_size)

    @property
    def num_kv_heads(self) -> int:
        """KV heads in the cache."""
        return self.view.shape[1]

    @property
    def pages_per_block(self) -> int:
        """Pages in one cache block."""
        return self.view.shape[2] * self.view.shape[3]

    def gather(self, blocks: torch.Tensor, heads: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Copies pages out of the cache.

        Args:
            blocks: physical block ids, int64, any shape S.
            heads: KV head indices, broadcastable to S.
            pages: page index within the block, broadcastable to S.

        Returns:
            `[*S, page_size, head_size]` in the cache's dtype.
        """
        per_group = self.view.shape[3]
        if per_group == 1:
            picked = self.view[:, :, :, 0][blocks, heads, pages]
        else:
            picked = self.view[blocks, heads, pages // per_group, pages % per_group]
        lead = picked.dim() - (self.view.dim() - 4)
        inner = range(self.view.dim() - 4)
        order = self.token_dims + tuple(d for d in inner if d not in self.token_dims)
        picked = picked.permute(*range(lead), *(lead + d for d in order))
        return picked.reshape(*picked.shape[:lead], self.page_size, self.head_size)
