"""Attends to lists of tokens: with the queries in T to T, or with every query to T and to its newest tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.token_prefill.lists import ListedAttention, QueryTiles, TokenRows, kept_queries
from sparse_kernels.token_prefill.rule import TokenRule
from sparse_kernels.token_prefill.scratch import LISTED_AT_ONCE, Scratch
from sparse_kernels.token_prefill.tokens import KeptTokens
from sparse_kernels.token_prefill.triton.parts import base_2_logits, logit_factor, sink_logit, tile_of
from sparse_kernels.triton import add_tokens, arithmetic, read_rows


# Widths and places differ between steps. No step may wait for a compilation.
@triton.jit(
    do_not_specialize=["list_stride"],
    do_not_specialize_on_alignment=["starts_ptr", "counts_ptr", "rows_ptr"],
)
def _attend_listed(
    query_ptr, keys_ptr, values_ptr, starts_ptr, counts_ptr, rows_ptr, query_scale_ptr, key_scale_ptr, value_scale_ptr,
    sinks_ptr, output_ptr, query_strides, key_strides, output_strides, list_stride, scale,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Attends with some queries of a head and a run to the rows of a list; causal, aligned at the bottom right."""
    run = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    start = tl.load(starts_ptr + run)
    num_queries = tl.load(starts_ptr + run + 1) - start
    first = tl.program_id(0) * ROWS
    if first >= num_queries:
        return
    count = tl.load(counts_ptr + run)
    dim = tl.arange(0, DIMS)
    real = dim < HEAD_SIZE
    index = first + tl.arange(0, ROWS)
    exists = index < num_queries
    token = (start + index).to(tl.int64)
    mask = exists[:, None] & real[None, :]
    query_place = query_ptr + token * query_strides[0] + head * query_strides[1]
    query = tl.load(query_place[:, None] + dim[None, :], mask=mask, other=0.0).to(DTYPE)
    factor = logit_factor(scale, query_scale_ptr, key_scale_ptr)
    newest = count - num_queries + index
    table = rows_ptr + run * list_stride
    within = (head // GROUP) * key_strides[1]
    largest, total = sink_logit(sinks_ptr, head, ROWS)
    sums = tl.zeros((ROWS, DIMS), tl.float32)
    for other in range(0, tl.minimum(count, count - num_queries + first + ROWS), KEYS):
        column = other + tl.arange(0, KEYS)
        present = column < count
        place = tl.load(table + column, mask=present, other=0).to(tl.int64) * key_strides[0] + within
        keys = tl.trans(read_rows(keys_ptr, place, present, dim, HEAD_SIZE, DTYPE))
        logits = base_2_logits(query, keys, factor, SOFTCAP)
        logits = tl.where(present[None, :] & (column[None, :] <= newest[:, None]), logits, float("-inf"))
        values = read_rows(values_ptr, place, present, dim, HEAD_SIZE, DTYPE)
        largest, total, sums = add_tokens(largest, total, sums, logits, values, DTYPE)
    # A request without a context has attended to no token.
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    if value_scale_ptr is not None:
        sums *= tl.load(value_scale_ptr)
    output_place = output_ptr + token * output_strides[0] + head * output_strides[1]
    tl.store(output_place[:, None] + dim[None, :], sums.to(output_ptr.dtype.element_ty), mask=mask)


def attend_listed(listed: ListedAttention) -> None:
    """Attends with runs of queries to lists of tokens, in Triton."""
    _, num_heads, head_size = listed.query.shape
    keys = listed.keys
    rows, columns = tile_of(head_size)
    _attend_listed[(triton.cdiv(listed.max_query_tokens, rows), num_heads, len(listed.counts))](
        listed.query, keys, listed.values, listed.query_start, listed.counts, listed.rows, listed.query_scale,
        listed.key_scale, listed.value_scale, listed.softmax.sink_logits, listed.output, listed.query.stride()[:2],
        (keys.stride(0), keys.stride(2)), listed.output.stride()[:2], listed.rows.stride(0),
        float(listed.softmax.scale), GROUP=num_heads // keys.shape[2], HEAD_SIZE=head_size,
        DIMS=triton.next_power_of_2(head_size), ROWS=rows, KEYS=columns, SOFTCAP=float(listed.softmax.softcap),
        DTYPE=arithmetic(listed.query), num_warps=4, num_stages=2,
    )  # fmt: skip


def attend_all(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    kept: KeptTokens,
    rule: TokenRule,
    attend: Callable[[ListedAttention], None],
    output: torch.Tensor,
) -> None:
    """Attends with every query to the tokens in T before its window, and to the tokens of its window.

    Args:
        batch: the requests that prefill.
        cache: their keys and values.
        softmax: how logits become weights.
        kept: T of each request.
        rule: the windows.
        attend: the attention, see `api.token_prefill`.
        output: where to write; tokens of no request do not change.
    """
    rows, tiles, width = TokenRows.of(cache), QueryTiles.of(batch, rule), batch.max_seq_tokens
    before = kept.before(tiles.request, tiles.window)
    counts = (before + tiles.end - tiles.window).clamp(min=0).int()
    # The extra column takes what a list does not have.
    kept_rows = rows.find(batch.block_table, torch.nn.functional.pad(kept.positions, (0, 1), value=-1))
    index = torch.arange(min(rule.local_tokens - 1 + rule.tile_tokens, width), device=before.device)
    # An entry of a window takes as much memory as ten of a list while it is found.
    at_once = max(1, LISTED_AT_ONCE // (width + 10 * len(index)))
    for first in range(0, len(tiles), at_once):
        some = slice(first, first + at_once)
        position = tiles.window[some, None] + index
        position = torch.where(position < tiles.end[some, None], position, -1)
        place = torch.where(position >= 0, before[some, None] + index, width)
        request = tiles.request[some]
        lists = kept_rows[request].scatter_(1, place, rows.find(batch.block_table[request], position))
        attend(
            ListedAttention(
                query=batch.query,
                query_start=tiles.starts[first : first + len(request) + 1],
                keys=rows.keys,
                values=rows.values,
                rows=lists,
                counts=counts[some],
                max_query_tokens=min(rule.tile_tokens, batch.max_query_tokens),
                max_seq_tokens=width,
                softmax=softmax,
                query_scale=batch.query_scale,
                key_scale=cache.key_scale,
                value_scale=cache.value_scale,
                output=output,
            )
        )


def attend_among_kept(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    kept: KeptTokens,
    attend: Callable[[ListedAttention], None],
    scratch: Scratch,
    output: torch.Tensor,
) -> None:
    """Attends with the queries in T to the tokens in T; other outputs do not change.

    Args:
        batch: the requests that prefill.
        cache: their keys and values.
        softmax: how logits become weights.
        kept: T of each request.
        attend: the attention, see `api.token_prefill`.
        scratch: memory for these requests.
        output: where to write.
    """
    rows = TokenRows.of(cache)
    queries = kept_queries(kept, batch)
    query, attended = scratch.query[: batch.num_tokens], scratch.output[: batch.num_tokens]
    # torch can only gather 8-bit floats as bytes.
    bits = torch.uint8 if query.dtype.itemsize == 1 else query.dtype
    torch.index_select(batch.query.view(bits), 0, queries.tokens, out=query.view(bits))
    attend(
        ListedAttention(
            query=query,
            query_start=queries.starts,
            keys=rows.keys,
            values=rows.values,
            rows=rows.find(batch.block_table, kept.positions),
            counts=kept.counts,
            max_query_tokens=batch.max_query_tokens,
            max_seq_tokens=batch.max_seq_tokens,
            softmax=softmax,
            query_scale=batch.query_scale,
            key_scale=cache.key_scale,
            value_scale=cache.value_scale,
            output=attended,
        )
    )
    torch.where(queries.mask[:, None, None], attended[queries.places], output, out=output)
