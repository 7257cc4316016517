"""Runs a sparse prefill on a GPU: scores, chooses, attends by FlashAttention, and restores the order of outputs."""

from __future__ import annotations

import torch

from sparse_kernels.batch import Copies, PrefillBatch, Softmax
from sparse_kernels.block_prefill.rule import BlockRule
from sparse_kernels.block_prefill.sequences import PageEntries, VarlenAttention, VirtualSequences
from sparse_kernels.block_prefill.tiles import Tiles
from sparse_kernels.block_prefill.triton.choose import virtual_sequences
from sparse_kernels.block_prefill.triton.rows import group_queries, ungroup
from sparse_kernels.block_prefill.triton.score import score_past
from sparse_kernels.cache import KVCache


def prefill_blocks(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    rule: BlockRule,
    tiles: Tiles,
    attend: VarlenAttention,
    output: torch.Tensor,
    counters: torch.Tensor | None,
    copies: Copies,
) -> None:
    """See `api.prefill_blocks`."""
    heads = cache.num_kv_heads
    rows = group_queries(batch, tiles, heads)
    if tiles.max_reads < tiles.max_past_blocks or rule.is_adaptive:
        scores = score_past(rows, batch, tiles, cache, rule, softmax.scale)
    else:
        scores = torch.empty(len(tiles), heads, 1, device=rows.device)
    entries = PageEntries.of(copies.keys, rule.block_tokens)
    pages, lengths = virtual_sequences(scores, copies.block_table, tiles, entries, rows.shape[1], rule, counters)
    attended = torch.empty(rows.shape, dtype=output.dtype, device=output.device)
    sequences = VirtualSequences(
        queries=rows,
        keys=entries.pages_of(copies.keys),
        values=entries.pages_of(copies.values),
        query_rows=tiles.query_rows(heads),
        max_rows=rule.tile_tokens,
        lengths=lengths,
        max_length=pages.shape[1] * entries.tokens,
        page_table=pages,
    )
    lse = attend(sequences, attended, softmax.sink_logits is not None)
    ungroup(attended, lse, softmax.sink_logits, tiles, output)
