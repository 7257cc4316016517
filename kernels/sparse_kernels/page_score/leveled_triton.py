"""Scores pages in two levels on a GPU, in two launches; see `levels`.

The first launch scores the first vectors of rows that are not refined whole. A program of the second finds the least
first score that is refined in its stripe of a row, and scores the pages from there on by their whole records.

Products are integers: a query head is rounded to 16-bit fixed point. The few operations on floats that follow are
rounded one by one, so another kernel can have the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import DecodeBatch
from sparse_kernels.page_score.levels import FLAT_PAGES, LEAST_OF_STRIPE, SHARE_UNITS, STRIPES, in_units
from sparse_kernels.page_score.triton import PAGES, num_pages, runs_at_once
from sparse_kernels.page_statistics import PageStatistics

_KEYS = 1024
"""First scores that a program reads at once."""
_ROUND = tl.constexpr(1.5 * 2**23)
_NOT_FINITE = tl.constexpr(2.0**100)
_FLAT_PAGES, _LEAST, _UNITS, _STRIPES = (tl.constexpr(x) for x in (FLAT_PAGES, LEAST_OF_STRIPE, SHARE_UNITS, STRIPES))


@triton.jit
def _fixed_point(query_row, DROPPED: tl.constexpr, HEAD_SIZE: tl.constexpr, BYTES: tl.constexpr):
    # Returns the even and odd elements of a query head, their sum, and half of their unit.
    element = 2 * tl.arange(0, BYTES)
    real = (element < HEAD_SIZE) & (element >= DROPPED)
    even = tl.load(query_row + element, mask=real, other=0.0).to(tl.float32)
    odd = tl.load(query_row + element + 1, mask=real, other=0.0).to(tl.float32)
    # A NaN counts as zero.
    even = tl.where(even == even, even, 0.0)
    odd = tl.where(odd == odd, odd, 0.0)
    unit = tl.div_rn(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=0), 32512.0)
    inverse = tl.where(unit > 0, tl.div_rn(1.0, tl.where(unit > 0, unit, 1.0)), 0.0)
    even = tl.clamp((even * inverse + _ROUND) - _ROUND, -32512.0, 32512.0).to(tl.int32)
    odd = tl.clamp((odd * inverse + _ROUND) - _ROUND, -32512.0, 32512.0).to(tl.int32)
    return even, odd, tl.sum(even + odd, axis=0), unit * 0.5


@triton.jit
def _product(row, exists, step, even, odd, middle, half_unit, BYTES: tl.constexpr, ROW_BYTES: tl.constexpr):
    # Returns the products of a query head with a row of codes of each page.
    byte = tl.arange(0, BYTES)[None, :]
    codes = tl.load(row[:, None] + byte, mask=exists[:, None] & (byte < ROW_BYTES), other=0).to(tl.int32)
    total = tl.sum((codes & 15) * even[None, :] + (codes >> 4) * odd[None, :], axis=1)
    # A code stands for itself minus half of the largest code.
    return ((2 * total - 15 * middle).to(tl.float32) * half_unit) * step


@triton.jit
def _first_level(product):
    return tl.where(tl.abs(product) > _NOT_FINITE, tl.abs(product), product)


@triton.jit
def _first_scores(
    query_ptr,
    vectors_ptr,
    steps_ptr,
    table_ptr,
    lengths_ptr,
    skipped_ptr,
    scores_ptr,
    query_strides,
    vectors_strides,
    steps_strides,
    table_stride,
    scores_stride,
    tokens_per_request,
    num_kv_heads,
    page_size,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BYTES: tl.constexpr,
    DROPPED: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
):
    row = tl.program_id(0)
    token = row // num_kv_heads
    count = num_pages(lengths_ptr, skipped_ptr, row, token, tokens_per_request, page_size)
    if count <= _FLAT_PAGES:
        return
    head = (row % num_kv_heads).to(tl.int64)
    table = table_ptr + (token // tokens_per_request).to(tl.int64) * table_stride
    for first in range(tl.program_id(1) * PAGES, count, tl.num_programs(1) * PAGES):
        page = first + tl.arange(0, PAGES)
        exists = page < count
        block = tl.load(table + page // PAGES_PER_BLOCK, mask=exists, other=0).to(tl.int64)
        within = page % PAGES_PER_BLOCK
        record = vectors_ptr + block * vectors_strides[0] + head * vectors_strides[1] + within * vectors_strides[2]
        step = steps_ptr + block * steps_strides[0] + head * steps_strides[1] + within * steps_strides[2]
        step = tl.load(step, mask=exists, other=0.0).to(tl.float32)
        best = tl.full((PAGES,), float("-inf"), tl.float32)
        for g in range(GROUP):
            query_row = query_ptr + token.to(tl.int64) * query_strides[0] + (head * GROUP + g) * query_strides[1]
            even, odd, middle, half_unit = _fixed_point(query_row, DROPPED, HEAD_SIZE, BYTES)
            product = _product(record, exists, step, even, odd, middle, half_unit, BYTES, HEAD_SIZE // 2)
            best = tl.maximum(best, _first_level(product), propagate_nan=tl.PropagateNan.ALL)
        tl.store(scores_ptr + row.to(tl.int64) * scores_stride + page, best.to(tl.bfloat16), mask=exists)


@triton.jit
def _ordered(score):
    # Ordered like the scores: NaN like -inf, -0 like 0. From 0 to 65,535, and nothing that exists is 0.
    score = tl.where(score == score, score.to(tl.float32) + 0.0, float("-inf"))
    bits = (score.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return tl.where(bits >= 0x8000, bits ^ 0xFFFF, bits | 0x8000)


@triton.jit
def _page_of(virtual, stripe, PAGES_PER_BLOCK: tl.constexpr):
    # The page of a row, by the number of the page in its stripe.
    return (virtual // PAGES_PER_BLOCK * _STRIPES + stripe) * PAGES_PER_BLOCK + virtual % PAGES_PER_BLOCK


@triton.jit
def _refine(
    query_ptr,
    vectors_ptr,
    steps_ptr,
    table_ptr,
    lengths_ptr,
    skipped_ptr,
    scores_ptr,
    query_strides,
    vectors_strides,
    steps_strides,
    table_stride,
    scores_stride,
    tokens_per_request,
    num_kv_heads,
    page_size,
    share,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BYTES: tl.constexpr,
    DROPPED: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
    KEYS: tl.constexpr,
):
    row = tl.program_id(0)
    stripe = tl.program_id(1)
    token = row // num_kv_heads
    count = num_pages(lengths_ptr, skipped_ptr, row, token, tokens_per_request, page_size)
    head = (row % num_kv_heads).to(tl.int64)
    table = table_ptr + (token // tokens_per_request).to(tl.int64) * table_stride
    scores = scores_ptr + row.to(tl.int64) * scores_stride

    # The pages of the stripe: whole groups of blocks, and what the last group has of it.
    group_pages = PAGES_PER_BLOCK * _STRIPES
    rest = tl.minimum(tl.maximum(count % group_pages - stripe * PAGES_PER_BLOCK, 0), PAGES_PER_BLOCK)
    pages_of_stripe = count // group_pages * PAGES_PER_BLOCK + rest
    wanted = tl.maximum((pages_of_stripe * share + _UNITS - 1) // _UNITS, _LEAST)
    least = 0
    leveled = count > _FLAT_PAGES
    if leveled & (wanted < pages_of_stripe):
        # The largest number that at least as many keys reach as are wanted, bit by bit.
        for step in range(16):
            tried = least | (0x8000 >> step)
            reach = 0
            for first in range(0, pages_of_stripe, KEYS):
                virtual = first + tl.arange(0, KEYS)
                exists = virtual < pages_of_stripe
                key = _ordered(tl.load(scores + _page_of(virtual, stripe, PAGES_PER_BLOCK), mask=exists, other=0.0))
                reach += tl.sum((exists & (key >= tried)).to(tl.int32), axis=0)
            least = tl.where(reach >= wanted, tried, least)

    for first in range(0, pages_of_stripe, PAGES):
        virtual = first + tl.arange(0, PAGES)
        page = _page_of(virtual, stripe, PAGES_PER_BLOCK)
        exists = virtual < pages_of_stripe
        kept = exists
        if least > 0:
            kept = kept & (_ordered(tl.load(scores + page, mask=exists, other=0.0)) >= least)
        block = tl.load(table + page // PAGES_PER_BLOCK, mask=kept, other=0).to(tl.int64)
        within = page % PAGES_PER_BLOCK
        record = vectors_ptr + block * vectors_strides[0] + head * vectors_strides[1] + within * vectors_strides[2]
        steps = steps_ptr + block * steps_strides[0] + head * steps_strides[1] + within * steps_strides[2]
        best = tl.full((PAGES,), float("-inf"), tl.float32)
        # The heads of a group read the same records; all but the first find them in the nearest cache.
        for g in range(GROUP):
            query_row = query_ptr + token.to(tl.int64) * query_strides[0] + (head * GROUP + g) * query_strides[1]
            even, odd, middle, half_unit = _fixed_point(query_row, DROPPED, HEAD_SIZE, BYTES)
            products = ()
            for v in tl.static_range(4):
                step = tl.load(steps + v * steps_strides[3], mask=kept, other=0.0).to(tl.float32)
                place = record + v * vectors_strides[3]
                product = _product(place, kept, step, even, odd, middle, half_unit, BYTES, HEAD_SIZE // 2)
                products = products + (product,)  # type: ignore[assignment]  # noqa: RUF005 - Triton's tuples only add
            older = products[1] + tl.abs(products[2])  # type: ignore[misc]
            newer = tl.abs(products[3]) - products[1]  # type: ignore[misc]
            score = _first_level(products[0]) + tl.maximum(older, newer)  # type: ignore[misc]
            best = tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL)
        best = tl.where(kept, best, float("-inf"))
        tl.store(scores + page, best.to(tl.bfloat16), mask=exists)


def launch_scores(
    batch: DecodeBatch,
    statistics: PageStatistics,
    page_size: int,
    scores: torch.Tensor,
    skipped: torch.Tensor | None,
    refined: float,
) -> None:
    """See `cuda.launch_scores`."""
    num_kv_heads, codes, steps = statistics.vectors.shape[1], statistics.kind.codes, statistics.scales
    assert codes is not None
    assert steps is not None
    rows, width = batch.num_tokens * num_kv_heads, batch.block_table.shape[1] * statistics.pages_per_block
    arguments = (
        batch.query,
        statistics.vectors,
        steps,
        batch.block_table,
        batch.seq_lens,
        skipped,
        scores,
        batch.query.stride(),
        statistics.vectors.stride(),
        steps.stride(),
        batch.block_table.stride(0),
        scores.stride(1),
        batch.tokens_per_request,
        num_kv_heads,
        page_size,
    )
    constants = {
        "GROUP": batch.group_size(num_kv_heads),
        "HEAD_SIZE": batch.head_size,
        "BYTES": triton.next_power_of_2(batch.head_size) // 2,
        "DROPPED": codes.dropped,
        "PAGES_PER_BLOCK": statistics.pages_per_block,
        "PAGES": PAGES,
        "num_warps": 4,
        # A product and a sum would otherwise be rounded once.
        "enable_fp_fusion": False,
    }
    if width > FLAT_PAGES:
        _first_scores[(rows, runs_at_once(batch, statistics, rows))](*arguments, **constants)
    _refine[(rows, STRIPES)](*arguments, in_units(refined), KEYS=_KEYS, **constants)
