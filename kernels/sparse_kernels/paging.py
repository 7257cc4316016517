"""The layout of keys and values in a paged cache, page by page, for every packing of a block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch


def memory_of(tensor: torch.Tensor) -> Any:
    """Returns a tensor's memory from its first element to the end of its storage, as a 1-D NumPy array.

    Kernels that compute addresses need it: a compiler vectorises only memory that it knows to be contiguous. 16-bit
    floats are returned as their bits.
    """
    reach = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    flat = tensor.as_strided((reach,), (1,))
    return flat.view(torch.uint16).numpy() if tensor.element_size() == 2 else flat.numpy()


class PageAddresses(NamedTuple):
    """The layout of the elements of a page, as runs of equally spaced elements."""

    elements: Any
    """The bits of the cache from the first page's first element on, `[num_elements]`."""
    strides: tuple[int, int, int, int]
    """Elements from one block, KV head, page group and page within a group to the next."""
    pages_per_group: int
    """Pages of a page group."""
    offsets: Any
    """`[num_runs]` int32 NumPy array: elements from the start of a page to each run."""
    length: int
    """Elements of a run."""
    step: int
    """Distance between consecutive elements of a run, in elements."""

    @property
    def location(self) -> tuple[Any, ...]:
        """All fields except the shape of a run, which compiled kernels take as constants; flat, as Numba requires."""
        return self.elements, self.offsets, self.pages_per_group, *self.strides


@dataclass(frozen=True)
class PagedTensor:
    """The keys or the values of a block-paged cache, addressable by page.

    A cache block of one KV head holds `block_size` tokens. Attention kernels pack the tokens in different orders, so a
    page is rarely contiguous. `view` exposes the pages without a copy. `token_dims` says which of its trailing
    dimensions enumerate tokens, outermost first; the others enumerate the elements of the head.
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
        """Returns the pages of a cache that stores one row per token.

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
    def token_major(self) -> PageAddresses:
        """The elements of a page, token by token."""
        return self._addresses(self._token_major)

    @cached_property
    def head_major(self) -> PageAddresses:
        """The elements of a page: the first elements of all tokens, then the second elements, and so on."""
        inner = range(self.view.dim() - 4)
        return self._addresses(tuple(dim for dim in inner if dim not in self.token_dims) + self.token_dims)

    def _addresses(self, order: tuple[int, ...]) -> PageAddresses:
        view = self.view
        *outer, (length, step) = [(view.shape[4 + dim], view.stride(4 + dim)) for dim in order]
        offsets = torch.zeros((), dtype=torch.int32)
        for size, stride in outer:
            offsets = offsets.unsqueeze(-1) + torch.arange(size, dtype=torch.int32) * stride
        block, head, group, page = view.stride()[:4]
        strides = block, head, group, page
        return PageAddresses(
            elements=memory_of(view),
            strides=strides,
            pages_per_group=view.shape[3],
            offsets=offsets.flatten().numpy(),
            length=length,
            step=step,
        )

    @cached_property
    def by_head(self) -> PagedTensor:
        """The same pages with the blocks of every KV head numbered separately, as a cache of one KV head: block b of
        head h becomes block `b * num_kv_heads + h`.

        Raises:
            RuntimeError: if the heads of a block are not adjacent.
        """
        return replace(self, view=self.view.view(-1, 1, *self.view.shape[2:]))

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

    def gather_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Copies whole blocks out of the cache, which is faster than copying their pages.

        Args:
            blocks: `[num_blocks]` int64, physical block ids.

        Returns:
            `[num_kv_heads, num_blocks * block_size, head_size]` in the cache's dtype.
        """
        # torch cannot select 8-bit floats on every device, but it can select bytes.
        bits = self.view.view(torch.uint8) if self.view.dtype.itemsize == 1 else self.view
        picked = bits.index_select(0, blocks).permute(1, 0, 2, 3, *(4 + dim for dim in self._token_major))
        return picked.reshape(self.num_kv_heads, -1, self.head_size).view(self.view.dtype)

    def gather_tokens(self, blocks: torch.Tensor, heads: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Copies single tokens out of the cache.

        Args:
            blocks: physical block ids, int64, broadcastable to a shape S with the others.
            heads: KV head indices.
            tokens: index of the token within the block.

        Returns:
            `[*S, head_size]`; for a cache of 8-bit floats their bytes, which torch can gather.
        """
        view, index = self._by_token(blocks, heads, tokens)
        return view[index].reshape(*torch.broadcast_shapes(blocks.shape, heads.shape, tokens.shape), self.head_size)

    def scatter_tokens(
        self, blocks: torch.Tensor, heads: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Writes single tokens to distinct places. Arguments and dtype are those of `gather_tokens` and its result."""
        view, index = self._by_token(blocks, heads, tokens)
        view[index] = rows.reshape(*rows.shape[:-1], *view.shape[len(index) :])

    def _by_token(
        self, blocks: torch.Tensor, heads: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Returns a view whose first dimensions enumerate tokens, and the index of the given tokens in it."""
        page, offset = tokens // self.page_size, tokens % self.page_size
        per_group = self.view.shape[3]
        within: list[torch.Tensor] = []
        for dim in reversed(self.token_dims):
            size = self.view.shape[4 + dim]
            within.insert(0, offset % size)
            offset = offset // size
        bits = self.view.view(torch.uint8) if self.view.dtype.itemsize == 1 else self.view
        view = bits.permute(0, 1, 2, 3, *(4 + dim for dim in self._token_major))
        return view, (blocks, heads, page // per_group, page % per_group, *within)
