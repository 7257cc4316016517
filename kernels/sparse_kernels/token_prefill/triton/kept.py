"""Attends among the tokens in T: the published form of ZipVL."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.token_prefill.scratch import Scratch
from sparse_kernels.token_prefill.tokens import KeptAttention, KeptTokens, kept_queries
from sparse_kernels.token_prefill.triton.parts import base_2_logits, logit_factor, rows_of_kept, sink_logit, tile_of
from sparse_kernels.triton import add_tokens, arithmetic, read_rows


@triton.jit
def _attend_kept(
    query_ptr, keys_ptr, values_ptr, starts_ptr, counts_ptr, rows_ptr, query_scale_ptr, key_scale_ptr, value_scale_ptr,
    sinks_ptr, output_ptr, row_stride, head_stride, rows_stride, scale,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Attends with some queries of a head to the rows of a table; causal, aligned at the bottom right."""
    request = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    start = tl.load(starts_ptr + request)
    num_queries = tl.load(starts_ptr + request + 1) - start
    first = tl.program_id(0) * ROWS
    if first >= num_queries:
        return
    count = tl.load(counts_ptr + request)
    dim = tl.arange(0, DIMS)
    real = dim < HEAD_SIZE
    index = first + tl.arange(0, ROWS)
    exists = index < num_queries
    token = (start + index).to(tl.int64) * tl.num_programs(1) + head
    mask = exists[:, None] & real[None, :]
    query = tl.load(query_ptr + token[:, None] * HEAD_SIZE + dim[None, :], mask=mask, other=0.0).to(DTYPE)
    factor = logit_factor(scale, query_scale_ptr, key_scale_ptr)
    newest = count - num_queries + index
    table = rows_ptr + request * rows_stride
    within = (head // GROUP) * head_stride
    largest, total = sink_logit(sinks_ptr, head, ROWS)
    sums = tl.zeros((ROWS, DIMS), tl.float32)
    for other in range(0, tl.minimum(count, count - num_queries + first + ROWS), KEYS):
        column = other + tl.arange(0, KEYS)
        present = column < count
        place = tl.load(table + column, mask=present, other=0).to(tl.int64) * row_stride + within
        keys = tl.trans(read_rows(keys_ptr, place, present, dim, HEAD_SIZE, DTYPE))
        logits = base_2_logits(query, keys, factor, SOFTCAP)
        logits = tl.where(present[None, :] & (column[None, :] <= newest[:, None]), logits, float("-inf"))
        values = read_rows(values_ptr, place, present, dim, HEAD_SIZE, DTYPE)
        largest, total, sums = add_tokens(largest, total, sums, logits, values, DTYPE)
    sums = sums / total[:, None]
    if value_scale_ptr is not None:
        sums *= tl.load(value_scale_ptr)
    tl.store(output_ptr + token[:, None] * HEAD_SIZE + dim[None, :], sums.to(output_ptr.dtype.element_ty), mask=mask)


def attend_kept(kept: KeptAttention) -> None:
    """Attends with the queries in T to the keys and values in T, in Triton."""
    _, num_heads, head_size = kept.query.shape
    keys = kept.keys
    rows, columns = tile_of(head_size)
    _attend_kept[(triton.cdiv(kept.max_query_tokens, rows), num_heads, len(kept.counts))](
        kept.query, keys, kept.values, kept.query_start, kept.counts, kept.rows, kept.query_scale, kept.key_scale,
        kept.value_scale, kept.softmax.sink_logits, kept.output, keys.stride(0), keys.stride(2), kept.rows.stride(0),
        float(kept.softmax.scale),
        GROUP=num_heads // keys.shape[2], HEAD_SIZE=head_size, DIMS=triton.next_power_of_2(head_size),
        ROWS=rows, KEYS=columns, SOFTCAP=float(kept.softmax.softcap), DTYPE=arithmetic(kept.query),
        num_warps=4, num_stages=2,
    )  # fmt: skip


def attend_among_kept(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    kept: KeptTokens,
    attend: Callable[[KeptAttention], None],
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
    keys, values, rows = rows_of_kept(batch, cache, kept)
    queries = kept_queries(kept, batch)
    query, attended = scratch.query[: batch.num_tokens], scratch.output[: batch.num_tokens]
    # torch can only gather 8-bit floats as bytes.
    bits = torch.uint8 if query.dtype.itemsize == 1 else query.dtype
    torch.index_select(batch.query.view(bits), 0, queries.tokens, out=query.view(bits))
    attend(
        KeptAttention(
            query=query,
            query_start=queries.starts,
            keys=keys,
            values=values,
            rows=rows,
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
