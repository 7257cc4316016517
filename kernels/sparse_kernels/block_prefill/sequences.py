"""Virtual sequences for FlashAttention: a page table defines them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from sparse_kernels.paging import PagedTensor


@dataclass(frozen=True)
class PageEntries:
    """Page numbers of one KV head, which make a cache of many heads look like a cache of one head.

    A page of a page table holds `tokens` tokens of one KV head. Pages begin at multiples of `unit`, which divides the
    distances between blocks, heads and pages of a block. The resulting pages may overlap.
    """

    tokens: int
    """Tokens of a page."""
    table_tokens: int
    """Tokens of a cache block."""
    unit: int
    """Elements from the start of page i to the start of page i + 1."""
    block_step: int
    """Page numbers from one block to the next."""
    head_step: int
    """Page numbers from one KV head to the next."""
    sub_step: int
    """Page numbers from one page of a block and head to the next."""

    @classmethod
    def of(cls, keys: PagedTensor, block_tokens: int) -> PageEntries:
        """Numbers the pages of a cache that stores one row per token.

        Args:
            keys: the keys; values follow them in the same rows.
            block_tokens: tokens of a key block; a multiple of the tokens of a page.
        """
        table_tokens = keys.pages_per_block * keys.page_size
        tokens = math.gcd(table_tokens, block_tokens)
        of_block, of_head, row = keys.view.stride(0), keys.view.stride(1), keys.view.stride(4)
        distances = [of_block, of_head] if keys.num_kv_heads > 1 else [of_block]
        if tokens < table_tokens:
            distances.append(tokens * row)
        unit = math.gcd(*distances)
        return cls(tokens, table_tokens, unit, of_block // unit, of_head // unit, tokens * row // unit)

    def pages_of(self, paged: PagedTensor) -> torch.Tensor:
        """Returns keys or values as pages of one head: `[num_pages, tokens, 1, head_size]`, a view."""
        view = paged.view
        blocks, heads = view.shape[:2]
        last = (
            (blocks - 1) * self.block_step
            + (heads - 1) * (self.head_step if heads > 1 else 0)
            + (self.table_tokens // self.tokens - 1) * (self.sub_step if self.tokens < self.table_tokens else 0)
        )
        row = view.stride(4)
        return view.as_strided((last + 1, self.tokens, 1, paged.head_size), (self.unit, row, row, 1))


@dataclass(frozen=True)
class VirtualSequences:
    """Sequences of one KV head each, with keys given by a page table: one per tile (or request) and KV head."""

    queries: torch.Tensor
    """`[num_rows, group_size, head_size]`."""
    keys: torch.Tensor
    """`[num_pages, page_tokens, 1, head_size]`."""
    values: torch.Tensor
    """Like `keys`."""
    query_rows: torch.Tensor
    """`[num_sequences + 1]` int32, where the rows of each sequence begin."""
    max_rows: int
    """An upper bound on the rows of a sequence."""
    lengths: torch.Tensor
    """`[num_sequences]` int32, tokens of each sequence."""
    max_length: int
    """An upper bound on `lengths`."""
    page_table: torch.Tensor
    """`[num_sequences, max_pages]` int32."""


class VarlenAttention(Protocol):
    """Causal attention of the last tokens of some sequences, aligned at their ends. vLLM's FlashAttention fits."""

    def __call__(self, sequences: VirtualSequences, output: torch.Tensor, wants_lse: bool) -> torch.Tensor | None:
        """Writes the output of each row.

        Args:
            sequences: queries, keys and values.
            output: `[num_rows, group_size, head_size]`.
            wants_lse: whether to return the logarithms of the denominators.

        Returns:
            `[group_size, num_rows]` float32, or None.
        """
