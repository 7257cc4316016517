"""Attends with a row on a GPU: programs handle pieces of the context, and torch merges their partial results.

A program reads keys and values of one KV head once, in place. Each query head has two rows: one attends to everything;
the other has logits of -inf for tokens that are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.row_attention.outputs import RowAttention

_PIECE = tl.constexpr(1024)
"""Tokens of a context that a program attends to."""
_TOKENS = tl.constexpr(64)
"""Tokens that it reads at a time: whole pages of every size."""
_LEAST = tl.constexpr(-1.0e30)
"""Below all logits, and finite, so that sums may start from it."""


# Lengths differ between steps. A kernel specialised for one length would not serve the next.
@triton.jit(do_not_specialize=["num_pages"])
def _attend_piece(
    query_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    context_ptr,
    read_ptr,
    sums_ptr,
    outputs_ptr,
    totals_ptr,
    keys_strides,
    values_strides,
    num_pages,
    factor,
    softcap,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    piece, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(context_ptr)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIMS)
    is_dense, real = row < GROUP, dim < HEAD_SIZE
    of_query = query_ptr + (head * GROUP + row % GROUP)[:, None] * HEAD_SIZE + dim[None, :]
    query = tl.load(of_query, mask=real[None, :], other=0.0)
    keys_ptr += head.to(tl.int64) * keys_strides[1]
    values_ptr += head.to(tl.int64) * values_strides[1]
    largest = tl.full((ROWS,), _LEAST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, DIMS), tl.float32)
    for start in range(piece * _PIECE, (piece + 1) * _PIECE, _TOKENS):
        token = start + tl.arange(0, _TOKENS)
        seen = token < context
        page = token // PAGE
        at = page // PAGES_PER_BLOCK
        block = tl.load(table_ptr + at, mask=seen, other=0).to(tl.int64)
        inside = token - at * (PAGES_PER_BLOCK * PAGE)
        # Memory beyond the context is stale and may hold NaN: it is not read.
        wanted = seen[:, None] & real[None, :]
        of_keys = keys_ptr + (block * keys_strides[0] + inside * keys_strides[2])[:, None] + dim[None, :]
        keys = tl.load(of_keys, mask=wanted, other=0.0)
        of_values = values_ptr + (block * values_strides[0] + inside * values_strides[2])[:, None] + dim[None, :]
        values = tl.load(of_values, mask=wanted, other=0.0)
        logits = tl.dot(query, tl.trans(keys)) * factor
        if HAS_SOFTCAP:
            logits = softcap * (2 * tl.sigmoid(2 * logits / softcap) - 1)
        logits = tl.where(seen[None, :], logits, float("-inf"))

        by_page = tl.reshape(logits, (ROWS, _TOKENS // PAGE, PAGE))
        top = tl.maximum(tl.max(by_page, axis=2), _LEAST)
        sums = top + tl.log(tl.sum(tl.exp(by_page - top[:, :, None]), axis=2))
        of_tile = start // PAGE + tl.arange(0, _TOKENS // PAGE)
        of_sums = sums_ptr + (head * GROUP + row)[:, None] * num_pages + of_tile[None, :]
        tl.store(of_sums, sums, mask=is_dense[:, None] & (of_tile < num_pages)[None, :])

        read = tl.load(read_ptr + head * num_pages + page, mask=seen, other=0) != 0
        logits = tl.where(is_dense[:, None] | read[None, :], logits, float("-inf"))
        base = tl.maximum(largest, tl.max(logits, axis=1))
        rescale = tl.exp(largest - base)
        weights = tl.exp(logits - base[:, None])
        total = total * rescale + tl.sum(weights, axis=1)
        # Two 16-bit numbers hold a weight with almost float32 precision, and products of such numbers are exact.
        upper = weights.to(values.dtype)
        lower = (weights - upper.to(tl.float32)).to(values.dtype)
        output = output * rescale[:, None] + tl.dot(upper, values) + tl.dot(lower, values)
        largest = base
    part = (piece * tl.num_programs(1) + head) * (2 * GROUP) + row
    tl.store(totals_ptr + 2 * part, largest, mask=row < 2 * GROUP)
    tl.store(totals_ptr + 2 * part + 1, total, mask=row < 2 * GROUP)
    of_outputs = outputs_ptr + part[:, None] * HEAD_SIZE + dim[None, :]
    tl.store(of_outputs, output, mask=(row < 2 * GROUP)[:, None] & real[None, :])


def attend_row(token: QueryTokens, cache: KVCache, read: torch.Tensor, softmax: Softmax) -> RowAttention:
    """See `api.attend_row`. Query, keys and values share one 16-bit dtype; each token has one contiguous row."""
    keys, values = cache.keys.view, cache.values.view
    query = token.query.contiguous()
    _, heads, group_size, head_size = query.shape
    num_pages = read.shape[2]
    pieces, device = triton.cdiv(num_pages * cache.page_size, _PIECE.value), query.device
    sums = torch.empty((1, heads, group_size, num_pages), dtype=torch.float32, device=device)
    outputs = torch.empty((pieces, heads, 2, group_size, head_size), dtype=torch.float32, device=device)
    totals = torch.empty((pieces, heads, 2, group_size, 2), dtype=torch.float32, device=device)
    _attend_piece[(pieces, heads)](
        query, keys, values, token.block_table.contiguous(), token.context_lens, read.contiguous().view(torch.uint8),
        sums, outputs, totals, (keys.stride(0), keys.stride(1), keys.stride(-2)),
        (values.stride(0), values.stride(1), values.stride(-2)), num_pages, float(softmax.scale),
        float(softmax.softcap), GROUP=group_size, ROWS=max(triton.next_power_of_2(2 * group_size), 16),
        HEAD_SIZE=head_size, DIMS=triton.next_power_of_2(head_size), PAGE=cache.page_size,
        PAGES_PER_BLOCK=cache.keys.pages_per_block, HAS_SOFTCAP=softmax.softcap > 0, num_stages=2,
    )  # fmt: skip
    largest = totals[..., 0]
    base = largest.amax(dim=0)
    sink = None if softmax.sink_logits is None else softmax.sink_logits.float().view(heads, 1, group_size)
    if sink is not None:
        base = torch.maximum(base, sink)
    factors = (largest - base).exp()
    total = (totals[..., 1] * factors).sum(dim=0)
    if sink is not None:
        total = total + (sink - base).exp()
    dense, sparse = ((outputs * factors[..., None]).sum(dim=0) / total[..., None]).unbind(dim=1)
    return RowAttention(sums, sparse[None], dense[None])
