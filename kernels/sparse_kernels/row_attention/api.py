"""Entry point of the row-attention operation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.row_attention import reference
from sparse_kernels.row_attention.outputs import RowAttention

_PIECE_TOKENS = 16_384
"""Tokens of a context that torch copies at once, which bounds the memory of the copy."""


def attend_row(token: QueryTokens, cache: KVCache, read: torch.Tensor, softmax: Softmax) -> RowAttention:
    """Attends with one query token to its whole context, and to the pages read. The host does not wait for the device.

    Args:
        token: the query token; its query has the dtype of the cache, or float32.
        cache: keys and values.
        read: `[1, num_kv_heads, num_pages]` bool, pages that are read, the incomplete page included. They form whole
            blocks, at least as many as the context fills.
        softmax: how logits become weights. A learned sink is part of the outputs, not of the page weights.

    Returns:
        Page sums and both outputs. Keys and values are used as stored, without their scales.

    Raises:
        ValueError: if the shapes disagree.
    """
    cache.check()
    token.check(cache.num_kv_heads, cache.head_size)
    pages_per_block = cache.keys.pages_per_block
    if read.shape[:2] != (1, cache.num_kv_heads) or len(token) != 1 or read.shape[2] % pages_per_block:
        raise ValueError(
            f"read: got {list(read.shape)} for {len(token)} tokens, allowed: [1, {cache.num_kv_heads}, a multiple of "
            f"{pages_per_block}] for one"
        )
    keys = cache.keys.view
    if keys.is_cuda and token.query.dtype == keys.dtype and keys.dtype.itemsize == 2:
        from sparse_kernels.row_attention import triton

        return triton.attend_row(token, cache, read, softmax)
    blocks = token.block_table[0, : read.shape[2] // pages_per_block].long()
    pieces = blocks.split(max(_PIECE_TOKENS // (pages_per_block * cache.page_size), 1))

    def values() -> Iterator[torch.Tensor]:
        start = 0
        for piece in pieces:
            found = cache.values.gather_blocks(piece).float()
            position = torch.arange(start, start + found.shape[1], device=found.device)
            # Memory beyond the context is stale and may hold NaN. A weight of 0 would not hide NaN.
            yield found.masked_fill_((position >= token.context_lens)[:, None], 0.0)
            start += found.shape[1]

    found_keys = (cache.keys.gather_blocks(piece) for piece in pieces)
    logits = reference.masked_logits(token.query, found_keys, token.context_lens, softmax)
    return reference.attend(logits, values(), read, cache.page_size, softmax)
