"""How keys and values lie in a paged cache, seen page by page whatever the packing of the block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch


class PageAddresses(NamedTuple):
    """Where the elements of a page lie, for kernels that compute addresses themselves."""

    elements: torch.Tensor
    """The cache from the first page's first element on, `[num_elements]`."""
    strides: tuple[int, int, int, int]
    """Elements from one block, KV head, page group and page within a group to the next."""
    offsets: torch.Tensor
    """`[page_size * head_size]` int32: elements from the start of a page to each of its elements, token-major."""


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

    @cached_property
    def addresses(self) -> PageAddresses:
        """The same pages as plain address arithmetic."""
        view = self.view
        reach = view.untyped_storage().nbytes() // view.element_size() - view.storage_offset()
        inner = list(zip(view.shape[4:], view.stride()[4:], strict=True))
        offsets = torch.zeros((), dtype=torch.int32)
        for dim in self._token_major:
            size, stride = inner[dim]
            offsets = offsets.unsqueeze(-1) + torch.arange(size, dtype=torch.int32) * stride
        block, head, group, page = view.stride()[:4]
        return PageAddresses(view.as_strided((reach,), (1,)), (block, head, group, page), offsets.flatten())

    @property
    def _token_major(self) -> tuple[int, ...]:
        inner = range(self.view.dim() - 4)
        return self.token_dims + tuple(dim for dim in inner if dim not in self.token_dims)

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
        picked = picked.permute(*range(lead), *(lead + dim for dim in self._token_major))
        return picked.reshape(*picked.shape[:lead], self.page_size, self.head_size)
