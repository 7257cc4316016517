"""Entry point of block-sparse prefill."""

from __future__ import annotations

import torch

from sparse_kernels.batch import Copies, PrefillBatch, Softmax
from sparse_kernels.block_prefill import reference
from sparse_kernels.block_prefill.rule import COUNTERS, BlockRule
from sparse_kernels.block_prefill.sequences import VarlenAttention
from sparse_kernels.block_prefill.tiles import Tiles
from sparse_kernels.cache import KVCache


def prefill_blocks(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    rule: BlockRule,
    tiles: Tiles,
    *,
    output: torch.Tensor,
    attend: VarlenAttention | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention of prompts. Each tile reads chosen key blocks of its past.

    Each tile and KV head estimates the attention weight of every past block from the statistics in the cache
    (`reference.block_logits`, `reference.measure_blocks`). It reads a fixed share of the past blocks, or as many as
    hold a share of the weight. It always reads the first and the newest past blocks, and its own blocks causally.
    Attention over these tokens is exact:

        o_i = sum over j in C(tile of i), j <= i of  softmax_j(s q_i . k_j) v_j

    where C is the set of tokens that the tile reads. The host reads no length.

    The choice depends only on the tile's queries and the context before the tile. Tiles begin at multiples of
    `rule.tile_tokens` of the context. A chunk border inside a tile splits it into two tiles with separate choices.
    Otherwise the output does not depend on how a prompt is cut.

    Args:
        batch: the queries; keys, values and statistics of their tokens are in the cache already.
        cache: keys, values and statistics of whole contexts.
        softmax: how logits become weights.
        rule: which blocks are read.
        tiles: `plan_tiles` of the batch, shared by all layers.
        output: `[num_tokens, num_query_heads, head_size]`, where to write.
        attend: the attention over virtual sequences; needed on a GPU only.
        counters: `[num_kv_heads, COUNTERS]` int64 to add to, see `rule.COUNTERS`; None for no counts.

    Returns:
        `output`.

    Raises:
        ValueError: if shapes disagree, or the cache has no statistics.
    """
    batch.check(cache.num_kv_heads, cache.head_size)
    cache.check()
    rule.check()
    softmax.check(batch.query.shape[1])
    if cache.statistics is None:
        raise ValueError("cache: got no page statistics, allowed: a cache with statistics")
    if rule.block_tokens % cache.page_size:
        raise ValueError(
            f"block_tokens: got {rule.block_tokens}, allowed: a multiple of the page size {cache.page_size}"
        )
    if output.shape != batch.query.shape:
        raise ValueError(f"output: got {list(output.shape)}, allowed: {list(batch.query.shape)}")
    if counters is not None and tuple(counters.shape) != (cache.num_kv_heads, COUNTERS):
        raise ValueError(f"counters: got {list(counters.shape)}, allowed: {[cache.num_kv_heads, COUNTERS]}")
    copies = batch.copies or Copies(cache.keys, cache.values, batch.block_table)
    if copies.keys.pages_per_block * copies.keys.page_size != cache.keys.pages_per_block * cache.page_size:
        raise ValueError("copies: got blocks of another size, allowed: blocks of the size of the cache")
    if attend is None:
        reference.prefill_blocks(batch, cache, softmax, rule, tiles, output, counters, copies)
    else:
        from sparse_kernels.block_prefill import triton

        triton.prefill_blocks(batch, cache, softmax, rule, tiles, attend, output, counters, copies)
    return output
