"""Attention under a page mask on a GPU, forward and backward: the soft mask, in the manner of FlashAttention.

A row of a tile is a query head of a token; the heads of a group lie side by side, since they share a mask. Some tokens
at a time, the pages' scores are computed once and become log m in place, which the kernels that attend read: a number
for a token, KV head and page beside a group's heads and a page's keys. Beside it there is, in the backward pass, which
head and vector has each score, and nothing else of that size.

In the backward pass the kernel of the queries writes what the scores' gradients are over log m, so that these go on to
the head and vector that won, in two kernels of their own. Gradients of keys, values and records are added up in
float32, part of the tokens after part and in each by one program, so that results do not depend on the launch.

The hard mask reads few pages and has kernels of its own (`lists.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sparse_kernels.masked_attention.lists import listed_attention
from sparse_kernels.masked_attention.packing import Packing, Tiles
from sparse_kernels.masked_attention.records import PageRecords
from sparse_kernels.masked_attention.rule import PageMask
from sparse_kernels.masked_attention.scores import (
    LOG2E,
    NOTHING,
    PIECE,
    PIECES,
    Call,
    Part,
    Records,
    count_true,
    norms,
    of_heads,
    reached_by,
    row_products,
    rows,
    scores_in_parts,
    tile_of,
    tile_rows,
)


class _Launch(NamedTuple):
    """How a kernel is launched."""

    rows: int
    """Query heads of tokens that a program works on at a time."""
    columns: int
    """Keys, or vectors of pages, that it works on at a time."""
    num_warps: int
    num_stages: int
    """At least 2 for gradients of queries: log m of a tile must be loaded before any thread writes over it."""


_FORWARD = _Launch(rows=128, columns=64, num_warps=8, num_stages=3)
_QUERY_GRADIENT = _Launch(rows=128, columns=64, num_warps=8, num_stages=2)
_KEY_GRADIENT = _Launch(rows=64, columns=128, num_warps=8, num_stages=2)
_SCORED_QUERIES = _Launch(rows=128, columns=64, num_warps=8, num_stages=2)
_SCORED_RECORDS = _Launch(rows=64, columns=128, num_warps=8, num_stages=2)
_MUCH_SHARED_MEMORY = 160 << 10
"""Bytes that a multiprocessor must have for these; on GPUs with less, tiles are half as long both ways."""


@triton.jit
def _repeated(x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Repeats each number along both axes, so often."""
    x = tl.broadcast_to(x[:, None, :, None], (x.shape[0], FIRST, x.shape[1], SECOND))
    return tl.reshape(x, (x.shape[0] * FIRST, x.shape[2] * SECOND))


@triton.jit
def _of_pages(pointer, token, exists, page, head, first_token, width, HEADS):
    """Loads numbers of a part's tokens and pages: `[TOKENS, PAGES]`, zero where there are none."""
    place = ((token - first_token).to(tl.int64) * HEADS + head) * width
    return tl.load(pointer + place[:, None] + page[None, :], mask=exists[:, None] & (page < width)[None, :], other=0)


@triton.jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=PIECES)
def _soften(
    scores_ptr,
    start_ptr,
    begin_ptr,
    length_ptr,
    threshold_ptr,
    first_token,
    width,
    slope,
    dense_tokens,
    budget,
    sink_pages,
    recent_pages,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECE: tl.constexpr,
    FIND: tl.constexpr,
):
    """Turns a token's scores into log m to the base 2, by the threshold that is found and kept, or was."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(start_ptr + row // PIECE) + row % PIECE
    if position >= tl.load(length_ptr + row // PIECE):
        return
    token = tl.load(begin_ptr + row // PIECE) + position
    row_ptr = scores_ptr + ((token - first_token).to(tl.int64) * HEADS + head) * width
    threshold_ptr += token.to(tl.int64) * HEADS + head
    complete = (position + 1) // PAGE_SIZE
    page = tl.arange(0, GROUPS)[:, None] + tl.arange(0, WIDTH // GROUPS)[None, :] * GROUPS
    log_m = tl.zeros((GROUPS, WIDTH // GROUPS), tl.float32)
    if (complete > budget) & (position >= dense_tokens):
        candidate = (page >= sink_pages) & (page < complete - recent_pages)
        score = tl.load(row_ptr + page, mask=candidate, other=0.0)
        if FIND:
            # The order of these integers is that of the scores; 0 and -0 are one.
            bits = (score + 0.0).to(tl.int32, bitcast=True)
            key = tl.where(candidate, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -0x80000000)
            left = budget - sink_pages - recent_pages
            low = reached_by(key, left, -0x7FFFFFFF)
            is_tied = count_true(key >= low) > left
            kept = tl.max(tl.max(tl.where(key == low, score, float("-inf")), axis=0), axis=0)
            below = tl.max(tl.max(tl.where(candidate & (key < low), score, float("-inf")), axis=0), axis=0)
            threshold = 0.5 * (kept + tl.where(is_tied, kept, below))
            tl.store(threshold_ptr, threshold)
        else:
            threshold = tl.load(threshold_ptr)
        x = (score - threshold) * slope
        softly = tl.minimum(x, 0.0) * LOG2E - tl.log2(1.0 + tl.exp2(-tl.abs(x) * LOG2E))
        log_m = tl.where(candidate, softly, 0.0)
    tl.store(row_ptr + page, log_m, mask=page < width)


@triton.jit
def _attend(
    query,
    position,
    token,
    begin,
    length,
    head,
    at,
    end,
    key_ptr,
    value_ptr,
    bias_ptr,
    first_token,
    width,
    scale,
    largest,
    total,
    attended,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Attends to keys from one place on to another, all of them before the rows, or some of them."""
    for key_at in range(at, end, KEYS):
        other = key_at + tl.arange(0, KEYS)
        key = of_heads(key_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
        value = of_heads(value_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
        page = key_at // PAGE_SIZE + tl.arange(0, KEYS // PAGE_SIZE)
        bias = _of_pages(bias_ptr, begin + token, token < length, page, head, first_token, width, HEADS)
        logit = tl.dot(query, tl.trans(key), input_precision="ieee") * scale + _repeated(bias, PADDED, PAGE_SIZE)
        if IS_CAUSAL:
            logit = tl.where(other[None, :] <= position[:, None], logit, float("-inf"))
        larger = tl.maximum(largest, tl.max(logit, axis=1))
        weight = tl.exp2(logit - larger[:, None])
        fading = tl.exp2(largest - larger)
        total = total * fading + tl.sum(weight, axis=1)
        attended = attended * fading[:, None]
        attended = tl.dot(weight.to(value.dtype), value, attended, input_precision="ieee")
        largest = larger
    return largest, total, attended


@triton.jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=PIECES)
def _forward(
    query_ptr,
    key_ptr,
    value_ptr,
    bias_ptr,
    output_ptr,
    log_sum_ptr,
    start_ptr,
    begin_ptr,
    length_ptr,
    first_page_ptr,
    first_token,
    width,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    PIECE: tl.constexpr,
):
    head = tl.program_id(1)
    start, begin, length, _page = tile_of(start_ptr, begin_ptr, length_ptr, first_page_ptr, TOKENS, PIECE)
    if start >= length:
        return
    position, group_head, exists, query = tile_rows(query_ptr, start, begin, length, head, HEADS, GROUP, PADDED, TOKENS,
                                                    HEAD_SIZE, DIMS)  # fmt: skip
    largest = tl.full((TOKENS * PADDED,), NOTHING, tl.float32)
    total = tl.zeros((TOKENS * PADDED,), tl.float32)
    attended = tl.zeros((TOKENS * PADDED, DIMS), tl.float32)
    token = start + tl.arange(0, TOKENS)
    whole = (start + 1) // KEYS * KEYS
    largest, total, attended = _attend(
        query, position, token, begin, length, head, 0, whole, key_ptr, value_ptr, bias_ptr, first_token, width,
        scale * LOG2E, largest, total, attended, HEADS, PADDED, KEYS, PAGE_SIZE, HEAD_SIZE, DIMS, False,
    )  # fmt: skip
    largest, total, attended = _attend(
        query, position, token, begin, length, head, whole, tl.minimum(start + TOKENS, length), key_ptr, value_ptr,
        bias_ptr, first_token, width, scale * LOG2E, largest, total, attended, HEADS, PADDED, KEYS, PAGE_SIZE,
        HEAD_SIZE, DIMS, True,
    )  # fmt: skip
    attended = attended / total[:, None]
    dim = tl.arange(0, DIMS)
    of_row = (begin + position).to(tl.int64) * (HEADS * GROUP) + head * GROUP + group_head
    tl.store(
        output_ptr + of_row[:, None] * HEAD_SIZE + dim[None, :],
        attended.to(output_ptr.dtype.element_ty),
        mask=exists[:, None] & (dim < HEAD_SIZE)[None, :],
    )
    tl.store(log_sum_ptr + of_row, largest + tl.log2(total), mask=exists)


@triton.jit
def _sum_keys(
    query,
    gradient,
    log_sum,
    product,
    position,
    token,
    begin,
    length,
    head,
    at,
    end,
    key_ptr,
    value_ptr,
    bias_ptr,
    first_token,
    width,
    scale,
    slope,
    result,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Adds what keys from one place on to another give queries, all of them before the rows, or some of them.

    Writes the gradients of the scores of their pages in place of log m.
    """
    # A product has 16 columns at least, so few pages are summed up with others that have no keys here.
    sums: tl.constexpr = KEYS // PAGE_SIZE if KEYS // PAGE_SIZE > 16 else 16
    of_page = (tl.arange(0, KEYS)[:, None] // PAGE_SIZE == tl.arange(0, sums)[None, :]).to(key_ptr.dtype.element_ty)
    place = ((begin - first_token + token).to(tl.int64) * HEADS + head) * width
    for key_at in range(at, end, KEYS):
        other = key_at + tl.arange(0, KEYS)
        key = of_heads(key_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
        value = of_heads(value_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
        page = key_at // PAGE_SIZE + tl.arange(0, KEYS // PAGE_SIZE)
        summed = key_at // PAGE_SIZE + tl.arange(0, sums)
        log_m = _of_pages(bias_ptr, begin + token, token < length, summed, head, first_token, width, HEADS)
        # In this order there is always a product under way while numbers are computed.
        logit = tl.dot(query, tl.trans(key), input_precision="ieee")
        of_weight = tl.dot(gradient, tl.trans(value), input_precision="ieee")
        bias = _of_pages(bias_ptr, begin + token, token < length, page, head, first_token, width, HEADS)
        logit = logit * (scale * LOG2E) + _repeated(bias, PADDED, PAGE_SIZE)
        weight = tl.exp2(logit - log_sum[:, None])
        if IS_CAUSAL:
            weight = tl.where(other[None, :] <= position[:, None], weight, 0.0)
        of_logit = (weight * (of_weight - product[:, None])).to(key.dtype)
        of_rows = tl.dot(of_logit, of_page, input_precision="ieee")
        result = tl.dot(of_logit, key, result, input_precision="ieee")
        of_log = tl.sum(tl.reshape(of_rows, (of_rows.shape[0] // PADDED, PADDED, sums)), axis=1)
        tl.store(
            bias_ptr + place[:, None] + summed[None, :],
            of_log * (1.0 - tl.exp2(log_m)) * slope,
            mask=(token < length)[:, None] & ((summed < width) & (summed < (key_at + KEYS) // PAGE_SIZE))[None, :],
        )
    return result


@triton.jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=PIECES)
def _query_gradient(
    query_ptr,
    key_ptr,
    value_ptr,
    gradient_ptr,
    log_sum_ptr,
    product_ptr,
    bias_ptr,
    query_gradient_ptr,
    start_ptr,
    begin_ptr,
    length_ptr,
    first_page_ptr,
    first_token,
    width,
    scale,
    slope,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Writes the gradients of queries by the logits, and in place of log m those of the scores."""
    head = tl.program_id(1)
    start, begin, length, _page = tile_of(start_ptr, begin_ptr, length_ptr, first_page_ptr, TOKENS, PIECE)
    if start >= length:
        return
    position, group_head, exists, query = tile_rows(query_ptr, start, begin, length, head, HEADS, GROUP, PADDED, TOKENS,
                                                    HEAD_SIZE, DIMS)  # fmt: skip
    gradient = rows(gradient_ptr, begin + position, group_head, exists, HEADS * GROUP * HEAD_SIZE, head, GROUP,
                    HEAD_SIZE, DIMS)  # fmt: skip
    of_row = (begin + position).to(tl.int64) * (HEADS * GROUP) + head * GROUP + group_head
    # Rows that do not exist have no weight.
    log_sum = tl.load(log_sum_ptr + of_row, mask=exists, other=-NOTHING)
    product = tl.load(product_ptr + of_row, mask=exists, other=0.0)
    token = start + tl.arange(0, TOKENS)
    result = tl.zeros((TOKENS * PADDED, DIMS), tl.float32)
    whole = (start + 1) // KEYS * KEYS
    result = _sum_keys(
        query, gradient, log_sum, product, position, token, begin, length, head, 0, whole, key_ptr, value_ptr, bias_ptr,
        first_token, width, scale, slope, result, HEADS, PADDED, KEYS, PAGE_SIZE, HEAD_SIZE, DIMS, False,
    )  # fmt: skip
    result = _sum_keys(
        query, gradient, log_sum, product, position, token, begin, length, head, whole,
        tl.minimum(start + TOKENS, length), key_ptr, value_ptr, bias_ptr, first_token, width, scale, slope, result,
        HEADS, PADDED, KEYS, PAGE_SIZE, HEAD_SIZE, DIMS, True,
    )  # fmt: skip
    dim = tl.arange(0, DIMS)
    tl.store(
        query_gradient_ptr + of_row[:, None] * HEAD_SIZE + dim[None, :],
        (result * scale).to(query_gradient_ptr.dtype.element_ty),
        mask=exists[:, None] & (dim < HEAD_SIZE)[None, :],
    )


@triton.jit
def _sum_readers(
    key,
    value,
    other,
    page,
    begin,
    head,
    at,
    end,
    query_ptr,
    gradient_ptr,
    log_sum_ptr,
    product_ptr,
    bias_ptr,
    first_token,
    width,
    scale,
    of_key,
    of_value,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Adds what positions from one on to another give keys and values, all of them after the keys, or some."""
    for start in range(at, end, TOKENS):
        position, group_head, exists, query = tile_rows(query_ptr, start, begin, end, head, HEADS, GROUP, PADDED,
                                                        TOKENS, HEAD_SIZE, DIMS)  # fmt: skip
        gradient = rows(gradient_ptr, begin + position, group_head, exists, HEADS * GROUP * HEAD_SIZE, head, GROUP,
                        HEAD_SIZE, DIMS)  # fmt: skip
        of_row = (begin + position).to(tl.int64) * (HEADS * GROUP) + head * GROUP + group_head
        token = start + tl.arange(0, TOKENS)
        # In this order there is a product under way while numbers are computed, and registers are free for both.
        logit = tl.dot(key, tl.trans(query), input_precision="ieee")
        of_weight = tl.dot(value, tl.trans(gradient), input_precision="ieee")
        bias = _of_pages(bias_ptr, begin + token, token < end, page, head, first_token, width, HEADS)
        logit = logit * (scale * LOG2E) + _repeated(tl.trans(bias), PAGE_SIZE, PADDED)
        # Rows that do not exist have no weight.
        log_sum = tl.load(log_sum_ptr + of_row, mask=exists, other=-NOTHING)
        weight = tl.exp2(logit - log_sum[None, :])
        if IS_CAUSAL:
            weight = tl.where(other[:, None] <= position[None, :], weight, 0.0)
        of_value = tl.dot(weight.to(gradient.dtype), gradient, of_value, input_precision="ieee")
        product = tl.load(product_ptr + of_row, mask=exists, other=0.0)
        of_logit = (weight * (of_weight - product[None, :])).to(query.dtype)
        of_key = tl.dot(of_logit, query, of_key, input_precision="ieee")
    return of_key, of_value


@triton.jit(do_not_specialize=["first_token", "last_token"])
def _key_gradient(
    query_ptr,
    key_ptr,
    value_ptr,
    gradient_ptr,
    log_sum_ptr,
    product_ptr,
    bias_ptr,
    key_gradient_ptr,
    value_gradient_ptr,
    start_ptr,
    begin_ptr,
    length_ptr,
    first_page_ptr,
    first_token,
    last_token,
    width,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Adds a part of the tokens' to the gradients of keys and values."""
    tile, head = tl.program_id(0), tl.program_id(1)
    at, begin, length = tl.load(start_ptr + tile), tl.load(begin_ptr + tile), tl.load(length_ptr + tile)
    start, end = tl.maximum(at, first_token - begin), tl.minimum(length, last_token - begin)
    if start >= end:
        return
    page = at // PAGE_SIZE + tl.arange(0, KEYS // PAGE_SIZE)
    other = at + tl.arange(0, KEYS)
    key = of_heads(key_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
    value = of_heads(value_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
    of_key = tl.zeros((KEYS, DIMS), tl.float32)
    of_value = tl.zeros((KEYS, DIMS), tl.float32)
    middle = tl.minimum(start + tl.cdiv(tl.maximum(at + KEYS - 1 - start, 0), TOKENS) * TOKENS, end)
    of_key, of_value = _sum_readers(
        key, value, other, page, begin, head, start, middle, query_ptr, gradient_ptr, log_sum_ptr, product_ptr,
        bias_ptr, first_token, width, scale, of_key, of_value, HEADS, GROUP, PAGE_SIZE, HEAD_SIZE, DIMS, PADDED, TOKENS,
        True,
    )  # fmt: skip
    of_key, of_value = _sum_readers(
        key, value, other, page, begin, head, middle, end, query_ptr, gradient_ptr, log_sum_ptr, product_ptr, bias_ptr,
        first_token, width, scale, of_key, of_value, HEADS, GROUP, PAGE_SIZE, HEAD_SIZE, DIMS, PADDED, TOKENS, False,
    )  # fmt: skip
    dim = tl.arange(0, DIMS)
    place = ((begin + other).to(tl.int64) * HEADS + head)[:, None] * HEAD_SIZE + dim[None, :]
    mask = (other < length)[:, None] & (dim < HEAD_SIZE)[None, :]
    of_key = of_key * scale + tl.load(key_gradient_ptr + place, mask=mask, other=0.0)
    tl.store(key_gradient_ptr + place, of_key, mask=mask)
    of_value += tl.load(value_gradient_ptr + place, mask=mask, other=0.0)
    tl.store(value_gradient_ptr + place, of_value, mask=mask)


@triton.jit
def _of_products(of_score, winner, PADDED: tl.constexpr, VECTORS: tl.constexpr):
    """Returns the gradients of rows' products with vectors: `[ROWS, PAGES * VECTORS]`, the score's where it is from."""
    number = tl.arange(0, PADDED)[:, None] * VECTORS + tl.arange(0, VECTORS)[None, :]
    is_winner = winner[:, None, :, None] == number[None, :, None, :]
    return tl.reshape(
        tl.where(is_winner, of_score[:, None, :, None], 0.0), (of_score.shape[0] * PADDED, of_score.shape[1] * VECTORS)
    )


@triton.jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=PIECES)
def _scored_queries(
    stored_ptr,
    scales_ptr,
    of_scores_ptr,
    winners_ptr,
    query_gradient_ptr,
    start_ptr,
    begin_ptr,
    length_ptr,
    first_page_ptr,
    first_token,
    width,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    VECTORS: tl.constexpr,
    PAGES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Adds what scores give to the gradients of queries."""
    head = tl.program_id(1)
    start, begin, length, first_page = tile_of(start_ptr, begin_ptr, length_ptr, first_page_ptr, TOKENS, PIECE)
    complete = tl.minimum(start + TOKENS, length) // PAGE_SIZE
    if (start >= length) | (complete == 0):
        return
    token = start + tl.arange(0, TOKENS)
    dim, column = tl.arange(0, DIMS), tl.arange(0, PAGES * VECTORS)
    result = tl.zeros((TOKENS * PADDED, DIMS), tl.float32)
    for at in range(0, complete, PAGES):
        page = at + tl.arange(0, PAGES)
        of_score = _of_pages(of_scores_ptr, begin + token, token < length, page, head, first_token, width, HEADS)
        winner = _of_pages(winners_ptr, begin + token, token < length, page, head, first_token, width, HEADS)
        of_page = at + column // VECTORS
        index = ((first_page + of_page).to(tl.int64) * HEADS + head) * VECTORS + column % VECTORS
        x = tl.load(
            stored_ptr + index[:, None] * HEAD_SIZE + dim[None, :],
            mask=(of_page < complete)[:, None] & (dim < HEAD_SIZE)[None, :],
            other=0.0,
        )
        of_product = _of_products(of_score, winner, PADDED, VECTORS)
        if scales_ptr is not None:
            of_product *= tl.load(scales_ptr + index, mask=of_page < complete, other=0.0)[None, :]
        result = tl.dot(of_product.to(x.dtype), x, result, input_precision="ieee")
    row = tl.arange(0, TOKENS * PADDED)
    position, group_head = start + row // PADDED, row % PADDED
    of_row = (begin + position).to(tl.int64) * (HEADS * GROUP) + head * GROUP + group_head
    place = of_row[:, None] * HEAD_SIZE + dim[None, :]
    mask = ((position < length) & (group_head < GROUP))[:, None] & (dim < HEAD_SIZE)[None, :]
    result += tl.load(query_gradient_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(query_gradient_ptr + place, result.to(query_gradient_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_token", "last_token"])
def _scored_records(
    query_ptr,
    of_scores_ptr,
    winners_ptr,
    vectors_gradient_ptr,
    spread_gradient_ptr,
    start_ptr,
    begin_ptr,
    length_ptr,
    first_page_ptr,
    first_token,
    last_token,
    width,
    std_weight,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    VECTORS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Adds what the scores of a part of the tokens give to the gradients of vectors and deviations."""
    tile, head = tl.program_id(0), tl.program_id(1)
    at, begin, length = tl.load(start_ptr + tile), tl.load(begin_ptr + tile), tl.load(length_ptr + tile)
    first, end = tl.maximum(at, first_token - begin), tl.minimum(length, last_token - begin)
    if first >= end:
        return
    page = at // PAGE_SIZE + tl.arange(0, PAGES)
    of_vectors = tl.zeros((PAGES * VECTORS, DIMS), tl.float32)
    of_spread = tl.zeros((PAGES * VECTORS,), tl.float32)
    for start in range(first, end, TOKENS):
        _position, _head, _exists, query = tile_rows(query_ptr, start, begin, end, head, HEADS, GROUP, PADDED, TOKENS,
                                                     HEAD_SIZE, DIMS)  # fmt: skip
        token = start + tl.arange(0, TOKENS)
        of_score = _of_pages(of_scores_ptr, begin + token, token < end, page, head, first_token, width, HEADS)
        winner = _of_pages(winners_ptr, begin + token, token < end, page, head, first_token, width, HEADS)
        of_product = tl.trans(_of_products(of_score, winner, PADDED, VECTORS))
        of_vectors = tl.dot(of_product.to(query.dtype), query, of_vectors, input_precision="ieee")
        if spread_gradient_ptr is not None:
            of_spread += tl.sum(of_product * norms(query, std_weight)[None, :], axis=1)
    dim, column = tl.arange(0, DIMS), tl.arange(0, PAGES * VECTORS)
    first_page = tl.load(first_page_ptr + tile)
    of_page = at // PAGE_SIZE + column // VECTORS
    index = ((first_page + of_page).to(tl.int64) * HEADS + head) * VECTORS + column % VECTORS
    place = index[:, None] * HEAD_SIZE + dim[None, :]
    mask = (of_page < length // PAGE_SIZE)[:, None] & (dim < HEAD_SIZE)[None, :]
    of_vectors += tl.load(vectors_gradient_ptr + place, mask=mask, other=0.0)
    tl.store(vectors_gradient_ptr + place, of_vectors, mask=mask)
    if spread_gradient_ptr is not None:
        place, mask = (first_page + page).to(tl.int64) * HEADS + head, page < length // PAGE_SIZE
        of_pages = tl.sum(tl.reshape(of_spread, (PAGES, VECTORS)), axis=1)
        of_pages += tl.load(spread_gradient_ptr + place, mask=mask, other=0.0)
        tl.store(spread_gradient_ptr + place, of_pages, mask=mask)


def _shape(call: Call, launch: _Launch, device: torch.device) -> tuple[dict[str, int], int]:
    """Returns what a kernel is compiled for and how it is launched, and its columns."""
    shape = call.heads()
    smaller = max(shape["DIMS"] // 128, 1)
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    if gpu is not None and gpu.shared_memory_per_multiprocessor < _MUCH_SHARED_MEMORY:
        smaller *= 2
    shape |= {
        "PADDED": call.padded_group, "TOKENS": min(call.tokens(launch.rows // smaller), PIECE),
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip
    return shape, launch.columns // smaller


def _of_keys(call: Call, launch: _Launch, device: torch.device) -> dict[str, int]:
    """Returns what a kernel that attends is compiled for, and how it is launched."""
    shape, columns = _shape(call, launch, device)
    return shape | {"KEYS": max(columns, call.mask.page_size)}


def _of_vectors(call: Call, launch: _Launch, device: torch.device) -> dict[str, int]:
    """Returns what a kernel of the scores' gradients is compiled for, and how it is launched."""
    shape, columns = _shape(call, launch, device)
    return shape | {"VECTORS": call.vectors, "PAGES": max(columns // call.vectors, 1)}


def _soft_parts(
    call: Call, query: torch.Tensor, records: Records, threshold: torch.Tensor, is_found: bool
) -> Iterator[Part]:
    """Yields log m to the base 2 for some tokens at a time, the last ones first.

    Finds tau of each token and KV head for it, or, where it was found, says where log m comes from.
    """
    selection = call.mask.selection
    for part in scores_in_parts(call, query, records, torch.float32, with_winners=is_found):
        width = part.scores.shape[2]
        _soften[(len(part.pieces.start) * PIECE, call.num_kv_heads)](
            part.scores, *part.pieces[:3], threshold, part.first_token, width, _slope(call), call.mask.dense_tokens,
            selection.k, selection.sink_pages, selection.recent_pages, **call.of_pages(width), FIND=not is_found,
        )  # fmt: skip
        yield part


def _slope(call: Call) -> float:
    """Returns the factor of scores in the mask."""
    assert call.mask.temperature is not None
    return call.scale / call.mask.temperature


class _SoftAttention(torch.autograd.Function):
    """The kernels as torch differentiates them."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        vectors: torch.Tensor,
        spread: torch.Tensor | None,
        stored: torch.Tensor,
        scales: torch.Tensor | None,
        call: Call,
    ) -> torch.Tensor:
        records = (stored, scales, spread)
        threshold = query.new_empty((query.shape[0], call.num_kv_heads), dtype=torch.float32)
        output = torch.empty_like(query)
        log_sum = query.new_empty(query.shape[:2], dtype=torch.float32)
        shape = _of_keys(call, _FORWARD, query.device)
        for bias, _, pieces, first_token in _soft_parts(call, query, records, threshold, is_found=False):
            _forward[_grid(call, pieces, shape)](
                query, key, value, bias, output, log_sum, *pieces, first_token, bias.shape[2], call.scale, **shape,
                PIECE=PIECE,
            )  # fmt: skip
        ctx.save_for_backward(query, key, value, *records, threshold, output, log_sum)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, stored, scales, spread, threshold, output, log_sum = ctx.saved_tensors
        call: Call = ctx.call
        gradient = gradients[0].contiguous()
        inputs = (query, key, value, gradient, log_sum, row_products(gradient, output))
        of_query = torch.empty_like(query)
        of_key, of_value, of_vectors = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value, stored))
        of_spread = None if spread is None else torch.zeros_like(spread)
        of_queries, of_keys = (_of_keys(call, launch, query.device) for launch in (_QUERY_GRADIENT, _KEY_GRADIENT))
        of_scored_queries, of_records = (
            _of_vectors(call, launch, query.device) for launch in (_SCORED_QUERIES, _SCORED_RECORDS)
        )
        key_tiles = call.tiles(of_keys["KEYS"], query.device)
        page_tiles = call.tiles(of_records["PAGES"] * call.mask.page_size, query.device)
        last_token = query.shape[0]
        for bias, winners, pieces, first_token in _soft_parts(
            call, query, (stored, scales, spread), threshold, is_found=True
        ):
            width = bias.shape[2]
            _key_gradient[(len(key_tiles.start), call.num_kv_heads)](
                *inputs, bias, of_key, of_value, *key_tiles, first_token, last_token, width, call.scale, **of_keys
            )
            _query_gradient[_grid(call, pieces, of_queries)](
                *inputs, bias, of_query, *pieces, first_token, width, call.scale, _slope(call), **of_queries,
                PIECE=PIECE,
            )  # fmt: skip
            _scored_queries[_grid(call, pieces, of_scored_queries)](
                stored, scales, bias, winners, of_query, *pieces, first_token, width, **of_scored_queries, PIECE=PIECE
            )
            _scored_records[(len(page_tiles.start), call.num_kv_heads)](
                query, bias, winners, of_vectors, of_spread, *page_tiles, first_token, last_token, width,
                call.mask.selection.std_weight, **of_records,
            )  # fmt: skip
            last_token = first_token
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_vectors, of_spread, None, None, None


def _grid(call: Call, pieces: Tiles, shape: dict[str, int]) -> tuple[int, int]:
    """Returns the programs of a kernel that works on tiles of pieces."""
    return len(pieces.start) * (PIECE // shape["TOKENS"]), call.num_kv_heads


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    records: PageRecords,
    packing: Packing,
    mask: PageMask,
    scale: float,
) -> torch.Tensor:
    """See `api.masked_attention`."""
    num_kv_heads, head_size = key.shape[1:]
    call = Call(packing, mask, scale, num_kv_heads, query.shape[1] // num_kv_heads, records.vectors.shape[2], head_size)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    stored = records.stored.to(query.dtype).contiguous()
    spread = None if records.spread is None else records.spread.contiguous()
    if mask.is_hard:
        # Nothing about a page that is read or not reaches its score.
        served = (stored, records.scales, None if spread is None else spread.detach())
        return listed_attention(query, key, value, served, call)
    output: torch.Tensor = _SoftAttention.apply(
        query, key, value, records.vectors, spread, stored, records.scales, call
    )
    return output
