"""Entry point of block-sparse prefill."""

from __future__ import annotations

import torch

from sparse_kernels.batch import PrefillBatch, Softmax
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
    """Computes attention of prompts, each tile over the blocks of its past that its queries look for.

    A tile of queries and a KV head estimate from the statistics in the cache how much attention weight every past block
    has (`reference.block_logits`, `reference.measure_blocks`), and read a share of the blocks, or as many as hold a
    share of the weight; the first and the newest blocks always, and their own causally. Attention over what is read is
    exact:

        o_i = sum over j in C(tile of i), j <= i of  softmax_j(s q_i . k_j) v_j

    where C is what the tile reads. No length is read by the host.

    A tile's choice depends on its own queries, the context before it and nothing else; tiles begin at multiples of
    `rule.tile_tokens` of the context. So a chunk that begins or ends within a tile makes two choices of one, and that
    is all that depends on how a prompt is cut.

    Args:
        batch: the queries; keys, values and statistics of their tokens are in the cache already.
        cache: keys, values and statistics of whole contexts.
        softmax: how logits become weights.
        rule: which blocks are read.
        tiles: `plan_tiles` of the batch, which all layers share.
        output: `[num_tokens, num_query_heads, head_size]`, where to write.
        attend: on a GPU what attends, over virtual sequences.
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
    if attend is None:
        reference.prefill_blocks(batch, cache, softmax, rule, tiles, output, counters)
    else:
        from sparse_kernels.block_prefill import triton

        triton.prefill_blocks(batch, cache, softmax, rule, tiles, attend, output, counters)
    return output
