"""Attends with every query to the tokens in T and to its newest tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.token_prefill.tokens import KeptTokens
from sparse_kernels.token_prefill.triton.parts import base_2_logits, logit_factor, rows_of_kept, sink_logit, tile_of
from sparse_kernels.triton import add_tokens, arithmetic, read_rows, rows_at


@triton.jit
def _count_before(positions_ptr, count, limit):
    """Returns how many of some ascending positions are below a limit."""
    low = tl.zeros((), tl.int32)
    high = count
    while low < high:
        middle = (low + high) // 2
        is_before = tl.load(positions_ptr + middle) < limit
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    return low


# Widths differ between steps. No step may wait for a compilation.
@triton.jit(
    do_not_specialize=["table_stride", "kept_stride"],
    do_not_specialize_on_alignment=["table_ptr", "mask_ptr", "positions_ptr", "rows_ptr"],
)
def _attend_all(
    query_ptr, keys_ptr, values_ptr, starts_ptr, lengths_ptr, table_ptr, mask_ptr, positions_ptr, rows_ptr,
    counts_ptr, query_scale_ptr, key_scale_ptr, value_scale_ptr, sinks_ptr, output_ptr,
    query_strides, key_strides, output_strides, table_stride, kept_stride, scale, local_tokens,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Attends with some queries of a head.

    The window of these queries begins with the oldest token that is new enough for the first of them. All of them see
    the tokens in T before the window. Within the window a mask says what each query sees.
    """
    request = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // GROUP
    start = tl.load(starts_ptr + request)
    num_queries = tl.load(starts_ptr + request + 1) - start
    first = tl.program_id(0) * ROWS
    if first >= num_queries:
        return
    length = tl.load(lengths_ptr + request)
    table = table_ptr + request * table_stride
    index = first + tl.arange(0, ROWS)
    token = (start + index).to(tl.int64)
    position = length - num_queries + index
    dim = tl.arange(0, DIMS)
    real = (index < num_queries)[:, None] & (dim < HEAD_SIZE)[None, :]
    query_place = query_ptr + token * query_strides[0] + head * query_strides[1]
    query = tl.load(query_place[:, None] + dim[None, :], mask=real, other=0.0).to(DTYPE)
    factor = logit_factor(scale, query_scale_ptr, key_scale_ptr)
    largest, total = sink_logit(sinks_ptr, head, ROWS)
    sums = tl.zeros((ROWS, DIMS), tl.float32)

    window = tl.maximum(length - num_queries + first + 1 - local_tokens, 0)
    positions = positions_ptr + request * kept_stride
    num_before = _count_before(positions, tl.load(counts_ptr + request), window)
    for other in range(0, num_before, KEYS):
        place = other + tl.arange(0, KEYS)
        is_read = place < num_before
        # The table of rows saves a look-up in the block table, on which the loads of keys would wait.
        row = tl.load(rows_ptr + request * kept_stride + place, mask=is_read, other=0).to(tl.int64) * key_strides[2]
        row += kv_head * key_strides[1]
        keys = tl.trans(read_rows(keys_ptr, row, is_read, dim, HEAD_SIZE, DTYPE))
        logits = tl.where(is_read[None, :], base_2_logits(query, keys, factor, SOFTCAP), float("-inf"))
        values = read_rows(values_ptr, row, is_read, dim, HEAD_SIZE, DTYPE)
        largest, total, sums = add_tokens(largest, total, sums, logits, values, DTYPE)

    for other in range(window, tl.minimum(length - num_queries + first + ROWS, length), KEYS):
        column = other + tl.arange(0, KEYS)
        is_read = column < tl.minimum(length - num_queries + first + ROWS, length)
        in_t = tl.load(mask_ptr + request * kept_stride + column, mask=is_read, other=0) != 0
        row = rows_at(key_strides, table, column, is_read, kv_head, BLOCK_TOKENS)
        keys = tl.trans(read_rows(keys_ptr, row, is_read, dim, HEAD_SIZE, DTYPE))
        distance = position[:, None] - column[None, :]
        seen = (distance >= 0) & (in_t[None, :] | (distance < local_tokens))
        logits = base_2_logits(query, keys, factor, SOFTCAP)
        logits = tl.where(is_read[None, :] & seen, logits, float("-inf"))
        values = read_rows(values_ptr, row, is_read, dim, HEAD_SIZE, DTYPE)
        largest, total, sums = add_tokens(largest, total, sums, logits, values, DTYPE)

    # Every query sees itself.
    sums = sums / total[:, None]
    if value_scale_ptr is not None:
        sums *= tl.load(value_scale_ptr)
    output_place = output_ptr + token * output_strides[0] + head * output_strides[1]
    tl.store(output_place[:, None] + dim[None, :], sums.to(output_ptr.dtype.element_ty), mask=real)


def attend_all(
    batch: PrefillBatch, cache: KVCache, softmax: Softmax, kept: KeptTokens, local_tokens: int, output: torch.Tensor
) -> None:
    """Attends with every query to the tokens in T before it and to its newest tokens.

    Args:
        batch: the requests that prefill.
        cache: their keys and values.
        softmax: how logits become weights.
        kept: T of each request.
        local_tokens: newest tokens of a query, itself included.
        output: where to write; tokens of no request do not change.
    """
    *_, kept_rows = rows_of_kept(batch, cache, kept)
    keys, head_size, num_heads = cache.keys.view, cache.head_size, batch.query.shape[1]
    rows, columns = tile_of(head_size)
    _attend_all[(triton.cdiv(batch.max_query_tokens, rows), num_heads, batch.num_requests)](
        batch.query, keys, cache.values.view, batch.query_start, batch.seq_lens, batch.block_table,
        kept.mask.view(torch.uint8), kept.positions, kept_rows, kept.counts, batch.query_scale, cache.key_scale,
        cache.value_scale, softmax.sink_logits, output, batch.query.stride()[:2],
        (keys.stride(0), keys.stride(1), keys.stride(-2)), output.stride()[:2], batch.block_table.stride(0),
        kept.positions.stride(0), float(softmax.scale), local_tokens,
        GROUP=batch.group_size(cache.num_kv_heads), HEAD_SIZE=head_size, DIMS=triton.next_power_of_2(head_size),
        BLOCK_TOKENS=cache.page_size * cache.keys.pages_per_block, ROWS=rows, KEYS=columns,
        SOFTCAP=float(softmax.softcap), DTYPE=arithmetic(batch.query), num_warps=4, num_stages=2,
    )  # fmt: skip
