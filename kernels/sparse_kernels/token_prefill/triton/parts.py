"""Parts of the kernels of a sparse prefill."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import PrefillBatch
from sparse_kernels.cache import KVCache
from sparse_kernels.token_prefill.tokens import KeptTokens
from sparse_kernels.triton import LOG2E, to_base_2


class Tile(NamedTuple):
    """The work of a program in one step."""

    rows: int
    """Query tokens of a head."""
    keys: int


def tile_of(head_size: int) -> Tile:
    """Returns a tile that fits the shared memory of a thread block on every supported GPU, double buffered."""
    return Tile(64, 64) if head_size <= 128 else Tile(64, 32)


@triton.jit
def base_2_logits(query, keys, factor, SOFTCAP: tl.constexpr):
    """Returns products of queries with keys `[DIMS, keys]`, as logits to the base 2."""
    return to_base_2(tl.dot(query, keys, input_precision="ieee") * factor, SOFTCAP)


@triton.jit
def logit_factor(scale, query_scale_ptr, key_scale_ptr):
    """Returns the factor of products of queries and keys as they are stored."""
    if query_scale_ptr is not None:
        scale *= tl.load(query_scale_ptr)
    if key_scale_ptr is not None:
        scale *= tl.load(key_scale_ptr)
    return scale


@triton.jit
def sink_logit(sinks_ptr, head, ROWS: tl.constexpr):
    """Returns the largest logit and the sum of weights of each row before its first token."""
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks_ptr is not None:
        largest = tl.zeros((ROWS,), tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        total += 1.0
    return largest, total


def rows_of_kept(
    batch: PrefillBatch, cache: KVCache, kept: KeptTokens
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns views of keys and values as pages of one token, and a table of the tokens in T.

    Returns:
        Keys and values, `[num_rows, 1, num_kv_heads, head_size]` each, with overlapping rows. And
        `[num_requests, max_seq_tokens]` int32, the rows of the tokens in T in order, then 0.

    Raises:
        ValueError: if the cache does not store one contiguous row per token, at equal distances.
    """
    cache.check_rows()
    keys, values = cache.keys.view, cache.values.view
    block, head, token = keys.stride(0), keys.stride(1), keys.stride(-2)
    if block % token:
        raise ValueError(f"keys: got blocks of {block} elements, allowed: a multiple of a token's {token}")
    rows_per_block, block_tokens = block // token, cache.page_size * cache.keys.pages_per_block
    shape = (len(keys) - 1) * rows_per_block + block_tokens, 1, cache.num_kv_heads, cache.head_size
    strides = token, token, head, 1
    position = kept.positions.clamp(min=0)
    # Token t of block b is row `b * rows_per_block + t`.
    first = batch.block_table.gather(1, (position // block_tokens).long()) * rows_per_block
    rows = torch.where(kept.positions >= 0, first + position % block_tokens, 0)
    return keys.as_strided(shape, strides), values.as_strided(shape, strides), rows
