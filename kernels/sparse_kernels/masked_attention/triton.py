"""Attention under a page mask on a GPU, forward and backward in the manner of FlashAttention.

A row of a tile is a query head of a token; the heads of a group lie side by side, since they share a mask. Kernels that
attend compute the scores of a tile's pages anew, by one small product more for each tile of keys, and compare them with
a threshold kept for each token and KV head. The thresholds are found before, some tokens at a time: only their scores
are ever in memory, and never more than `_SCORES_AT_ONCE` of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sparse_kernels.masked_attention.packing import Packing, Tiles
from sparse_kernels.masked_attention.records import PageRecords
from sparse_kernels.masked_attention.rule import PageMask

_LOG2E = tl.constexpr(1.4426950408889634)
_NOTHING = tl.constexpr(-1e30)
"""Less than any logit, and finite, so that a tile without anything to read makes no NaN."""
_SCORES_AT_ONCE = 1 << 26
"""Scores of pages that are in memory while thresholds are found, 256 MiB."""


@triton.jit
def _rows(pointer, token, group_head, exists, heads_stride, HEAD, GROUP, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr):
    """Loads the rows of a tile: `[ROWS, DIMS]`, zero where there is none."""
    dim = tl.arange(0, DIMS)
    place = token.to(tl.int64) * heads_stride + (HEAD * GROUP + group_head) * HEAD_SIZE
    return tl.load(
        pointer + place[:, None] + dim[None, :], mask=exists[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0
    )


@triton.jit
def _of_heads(pointer, token, exists, head, HEADS, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr):
    """Loads keys, values or records of a KV head: `[len(token), DIMS]`, zero where there are none."""
    dim = tl.arange(0, DIMS)
    place = (token.to(tl.int64) * HEADS + head) * HEAD_SIZE
    return tl.load(
        pointer + place[:, None] + dim[None, :], mask=exists[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0
    )


@triton.jit
def _norms(query, std_weight):
    query = query.to(tl.float32)
    return tl.sqrt_rn(tl.sum(query * query, axis=1)) * std_weight


@triton.jit
def _tile_rows(
    query_ptr,
    start,
    begin,
    length,
    head,
    std_weight,
    HEADS,
    GROUP,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Returns of each row of a tile its position, its head in the group, whether it exists, its query and the norm."""
    row = tl.arange(0, TOKENS * PADDED)
    position, group_head = start + row // PADDED, row % PADDED
    exists = (position < length) & (group_head < GROUP)
    query = _rows(query_ptr, begin + position, group_head, exists, HEADS * GROUP * HEAD_SIZE, head, GROUP,
                  HEAD_SIZE, DIMS)  # fmt: skip
    return position, group_head, exists, query, _norms(query, std_weight)


@triton.jit
def _bounds(threshold_ptr, last_tie_ptr, begin, token, length, head, HEADS):
    """Returns the threshold of each token of a tile, and the last page that is read among those that equal it."""
    of_token = (begin + token).to(tl.int64) * HEADS + head
    threshold = tl.load(threshold_ptr + of_token, mask=token < length, other=0.0)
    return threshold, tl.load(last_tie_ptr + of_token, mask=token < length, other=0)


@triton.jit
def _row_scores(
    query,
    norm,
    page,
    exists,
    head,
    HEADS,
    stored_ptr,
    scales_ptr,
    spread_ptr,
    VECTORS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Scores pages for each row: the scores and the vectors that won, `[ROWS, PAGES]`."""
    best = tl.full((query.shape[0], page.shape[0]), float("-inf"), tl.float32)
    which = tl.zeros((query.shape[0], page.shape[0]), tl.int32)
    for v in tl.static_range(VECTORS):
        index = (page.to(tl.int64) * HEADS + head) * VECTORS + v
        dim = tl.arange(0, DIMS)
        x = tl.load(
            stored_ptr + index[:, None] * HEAD_SIZE + dim[None, :],
            mask=exists[:, None] & (dim < HEAD_SIZE)[None, :],
            other=0.0,
        )
        score = tl.dot(query, tl.trans(x), input_precision="ieee")
        if scales_ptr is not None:
            score *= tl.load(scales_ptr + index, mask=exists, other=0.0)[None, :]
        which = tl.where(score > best, v, which)
        best = tl.maximum(best, score)
    if spread_ptr is not None:
        spread = tl.load(spread_ptr + page.to(tl.int64) * HEADS + head, mask=exists, other=0.0)
        best += norm[:, None] * spread[None, :]
    return best, which


@triton.jit
def _of_group(scores, group_head, TOKENS: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, HARD: tl.constexpr):
    """Returns the largest scores of the rows of each token: `[TOKENS, PAGES]`; as they are served for the hard mask."""
    scores = tl.where((group_head < GROUP)[:, None], scores, float("-inf"))
    best = tl.max(tl.reshape(scores, (TOKENS, PADDED, scores.shape[1])), axis=1)
    return best.to(tl.bfloat16).to(tl.float32) if HARD else best


@triton.jit
def _always(page, context, dense_tokens, budget, sink_pages, recent_pages, PAGE_SIZE: tl.constexpr):
    """Returns which pages, numbered in their sequence, tokens read whatever their scores: `[TOKENS, PAGES]`."""
    complete = context // PAGE_SIZE
    whole = (complete <= budget) | (context <= dense_tokens)
    return (whole[:, None] | (page < sink_pages)[None, :]) | (page[None, :] >= (complete - recent_pages)[:, None])


@triton.jit
def _log_mask(best, always, page, threshold, last_tie, slope, HARD: tl.constexpr):
    """Returns log m, and what a score's gradient is of that of log m: `[TOKENS, PAGES]` both."""
    if HARD:
        equal = (best == threshold[:, None]) & (page[None, :] <= last_tie[:, None])
        read = always | (best > threshold[:, None]) | equal
        return tl.where(read, 0.0, float("-inf")), best
    x = (best - threshold[:, None]) * slope
    decay = tl.exp2(-tl.abs(x) * _LOG2E)
    log_m = tl.where(always, 0.0, tl.minimum(x, 0.0) - tl.log2(1.0 + decay) / _LOG2E)
    left = tl.where(x > 0, decay, 1.0) / (1.0 + decay)
    return log_m, tl.where(always, 0.0, left * slope)


@triton.jit
def _by_row(x, TOKENS: tl.constexpr, PADDED: tl.constexpr, PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Repeats numbers of tokens and pages for query heads and keys: `[ROWS, KEYS]`."""
    x = tl.broadcast_to(x[:, None, :, None], (TOKENS, PADDED, PAGES, PAGE_SIZE))
    return tl.reshape(x, (TOKENS * PADDED, PAGES * PAGE_SIZE))


@triton.jit
def _score_gradients(
    logit_gradient,
    row_scores,
    which,
    group_head,
    score_share,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Returns the gradients of the rows' scores `[ROWS, PAGES]`: that of log m, at the first head that has the best."""
    of_page = tl.sum(tl.reshape(logit_gradient, (TOKENS * PADDED, PAGES, PAGE_SIZE)), axis=2)
    of_token = tl.sum(tl.reshape(of_page, (TOKENS, PADDED, PAGES)), axis=1) * score_share
    scores = tl.where((group_head < GROUP)[:, None], row_scores, float("-inf"))
    scores = tl.reshape(scores, (TOKENS, PADDED, PAGES))
    best = tl.max(scores, axis=1)
    number = tl.arange(0, PADDED)[None, :, None]
    winner = tl.min(tl.where(scores == best[:, None, :], number, PADDED), axis=1)
    gradient = tl.where(number == winner[:, None, :], of_token[:, None, :], 0.0)
    return tl.reshape(gradient, (TOKENS * PADDED, PAGES))


@triton.jit
def _page_scores(
    query_ptr,
    stored_ptr,
    scales_ptr,
    spread_ptr,
    start_ptr,
    begin_ptr,
    length_ptr,
    first_page_ptr,
    scores_ptr,
    width,
    std_weight,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    VECTORS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    HARD: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    start, begin, length = tl.load(start_ptr + tile), tl.load(begin_ptr + tile), tl.load(length_ptr + tile)
    first_page = tl.load(first_page_ptr + tile)
    end = tl.minimum(start + TOKENS, length)
    complete = end // PAGE_SIZE
    if tl.program_id(2) * PAGES >= complete:
        return
    _, group_head, _, query, norm = _tile_rows(query_ptr, start, begin, length, head, std_weight, HEADS, GROUP, PADDED,
                                               TOKENS, HEAD_SIZE, DIMS)  # fmt: skip
    page = tl.program_id(2) * PAGES + tl.arange(0, PAGES)
    scores, _ = _row_scores(query, norm, first_page + page, page < complete, head, HEADS, stored_ptr, scales_ptr,
                            spread_ptr, VECTORS, HEAD_SIZE, DIMS)  # fmt: skip
    best = _of_group(scores, group_head, TOKENS, PADDED, GROUP, HARD)
    out = ((tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64) * HEADS + head) * width
    tl.store(scores_ptr + out[:, None] + page[None, :], best, mask=(page < complete)[None, :])


@triton.jit
def _thresholds(
    scores_ptr,
    start_ptr,
    begin_ptr,
    length_ptr,
    threshold_ptr,
    last_tie_ptr,
    width,
    dense_tokens,
    budget,
    sink_pages,
    recent_pages,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HARD: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(start_ptr + row // TOKENS) + row % TOKENS
    if position >= tl.load(length_ptr + row // TOKENS):
        return
    complete = (position + 1) // PAGE_SIZE
    if (complete <= budget) | (position < dense_tokens):
        return
    page = tl.arange(0, WIDTH)
    candidate = (page >= sink_pages) & (page < complete - recent_pages)
    score = tl.load(scores_ptr + (row.to(tl.int64) * HEADS + head) * width + page, mask=candidate, other=0.0)
    # The order of these integers is that of the scores; 0 and -0 are one.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000001
    key = tl.where(candidate, key, 0)
    left = budget - sink_pages - recent_pages
    low, high = tl.full((), 0, tl.int64), tl.full((), 0x200000000, tl.int64)
    # The largest key is looked for which `left` keys reach.
    for _ in range(34):
        middle = (low + high) // 2
        enough = tl.sum((key >= middle).to(tl.int32), axis=0) >= left
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    number_above = tl.sum((key > low).to(tl.int32), axis=0)
    equal = key == low
    if HARD:
        rank = tl.cumsum(equal.to(tl.int32), axis=0)
        last_tie = tl.max(tl.where(equal & (rank <= left - number_above), page, -1), axis=0)
        threshold = tl.max(tl.where(equal, score, float("-inf")), axis=0)
    else:
        last_tie = -1
        kept = tl.max(tl.where(equal, score, float("-inf")), axis=0)
        below = tl.max(tl.where(candidate & (key < low), score, float("-inf")), axis=0)
        is_tied = number_above + tl.sum(equal.to(tl.int32), axis=0) > left
        threshold = 0.5 * (kept + tl.where(is_tied, kept, below))
    out = (tl.load(begin_ptr + row // TOKENS) + position).to(tl.int64) * HEADS + head
    tl.store(threshold_ptr + out, threshold)
    tl.store(last_tie_ptr + out, last_tie)


@triton.jit
def _forward(
    query_ptr,
    key_ptr,
    value_ptr,
    stored_ptr,
    scales_ptr,
    spread_ptr,
    threshold_ptr,
    last_tie_ptr,
    output_ptr,
    log_sum_ptr,
    start_ptr,
    begin_ptr,
    length_ptr,
    first_page_ptr,
    scale,
    slope,
    std_weight,
    dense_tokens,
    budget,
    sink_pages,
    recent_pages,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    VECTORS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    HARD: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    start, begin, length = tl.load(start_ptr + tile), tl.load(begin_ptr + tile), tl.load(length_ptr + tile)
    first_page = tl.load(first_page_ptr + tile)
    end = tl.minimum(start + TOKENS, length)
    token = start + tl.arange(0, TOKENS)
    position, group_head, exists, query, norm = _tile_rows(query_ptr, start, begin, length, head, std_weight, HEADS,
                                                           GROUP, PADDED, TOKENS, HEAD_SIZE, DIMS)  # fmt: skip
    threshold, last_tie = _bounds(threshold_ptr, last_tie_ptr, begin, token, length, head, HEADS)
    largest = tl.full((TOKENS * PADDED,), _NOTHING, tl.float32)
    total = tl.zeros((TOKENS * PADDED,), tl.float32)
    attended = tl.zeros((TOKENS * PADDED, DIMS), tl.float32)
    for at in range(0, end, PAGES * PAGE_SIZE):
        page = at // PAGE_SIZE + tl.arange(0, PAGES)
        scores, _ = _row_scores(query, norm, first_page + page, page < length // PAGE_SIZE, head, HEADS, stored_ptr,
                                scales_ptr, spread_ptr, VECTORS, HEAD_SIZE, DIMS)  # fmt: skip
        best = _of_group(scores, group_head, TOKENS, PADDED, GROUP, HARD)
        always = _always(page, token + 1, dense_tokens, budget, sink_pages, recent_pages, PAGE_SIZE)
        log_m, _ = _log_mask(best, always, page, threshold, last_tie, slope, HARD)
        # What nobody in the tile reads is not loaded.
        if tl.max(tl.max(log_m, axis=1), axis=0) > float("-inf"):
            other = at + tl.arange(0, PAGES * PAGE_SIZE)
            key = _of_heads(key_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
            value = _of_heads(value_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
            logit = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * _LOG2E)
            logit += _by_row(log_m * _LOG2E, TOKENS, PADDED, PAGES, PAGE_SIZE)
            logit = tl.where(other[None, :] <= position[:, None], logit, float("-inf"))
            larger = tl.maximum(largest, tl.max(logit, axis=1))
            weight = tl.exp2(logit - larger[:, None])
            fading = tl.exp2(largest - larger)
            total = total * fading + tl.sum(weight, axis=1)
            attended = attended * fading[:, None]
            attended += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            largest = larger
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
def _query_gradient(
    query_ptr,
    key_ptr,
    value_ptr,
    stored_ptr,
    scales_ptr,
    spread_ptr,
    threshold_ptr,
    last_tie_ptr,
    gradient_ptr,
    log_sum_ptr,
    product_ptr,
    query_gradient_ptr,
    start_ptr,
    begin_ptr,
    length_ptr,
    first_page_ptr,
    scale,
    slope,
    std_weight,
    dense_tokens,
    budget,
    sink_pages,
    recent_pages,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    VECTORS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    HARD: tl.constexpr,
    ROOM: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    start, begin, length = tl.load(start_ptr + tile), tl.load(begin_ptr + tile), tl.load(length_ptr + tile)
    first_page = tl.load(first_page_ptr + tile)
    end = tl.minimum(start + TOKENS, length)
    token = start + tl.arange(0, TOKENS)
    position, group_head, exists, query, norm = _tile_rows(query_ptr, start, begin, length, head, std_weight, HEADS,
                                                           GROUP, PADDED, TOKENS, HEAD_SIZE, DIMS)  # fmt: skip
    gradient = _rows(gradient_ptr, begin + position, group_head, exists, HEADS * GROUP * HEAD_SIZE, head, GROUP,
                     HEAD_SIZE, DIMS)  # fmt: skip
    threshold, last_tie = _bounds(threshold_ptr, last_tie_ptr, begin, token, length, head, HEADS)
    of_row = (begin + position).to(tl.int64) * (HEADS * GROUP) + head * GROUP + group_head
    log_sum = tl.load(log_sum_ptr + of_row, mask=exists, other=0.0)
    product = tl.load(product_ptr + of_row, mask=exists, other=0.0)
    result = tl.zeros((TOKENS * PADDED, DIMS), tl.float32)
    for at in range(0, end, PAGES * PAGE_SIZE):
        page = at // PAGE_SIZE + tl.arange(0, PAGES)
        of_page = page < length // PAGE_SIZE
        scores, which = _row_scores(query, norm, first_page + page, of_page, head, HEADS, stored_ptr, scales_ptr,
                                    spread_ptr, VECTORS, HEAD_SIZE, DIMS)  # fmt: skip
        best = _of_group(scores, group_head, TOKENS, PADDED, GROUP, HARD)
        always = _always(page, token + 1, dense_tokens, budget, sink_pages, recent_pages, PAGE_SIZE)
        log_m, share = _log_mask(best, always, page, threshold, last_tie, slope, HARD)
        if tl.max(tl.max(log_m, axis=1), axis=0) > float("-inf"):
            other = at + tl.arange(0, PAGES * PAGE_SIZE)
            key = _of_heads(key_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
            value = _of_heads(value_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
            logit = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * _LOG2E)
            logit += _by_row(log_m * _LOG2E, TOKENS, PADDED, PAGES, PAGE_SIZE)
            seen = (other[None, :] <= position[:, None]) & exists[:, None]
            weight = tl.where(seen, tl.exp2(logit - log_sum[:, None]), 0.0)
            of_weight = tl.dot(gradient, tl.trans(value), input_precision="ieee")
            of_logit = weight * (of_weight - product[:, None])
            result += tl.dot(of_logit.to(key.dtype), key, input_precision="ieee") * scale
            if not HARD:
                of_score = _score_gradients(of_logit, scores, which, group_head, share, TOKENS, PADDED, PAGES,
                                            PAGE_SIZE, GROUP)  # fmt: skip
                dim = tl.arange(0, DIMS)
                # A product sums over 16 numbers at least, so few pages take part with zeros between them.
                wide = at // PAGE_SIZE + tl.arange(0, PAGES * ROOM) // ROOM
                exists_wide = wide < length // PAGE_SIZE
                is_first = (tl.arange(0, ROOM) == 0)[None, None, :]
                for v in tl.static_range(VECTORS):
                    index = ((first_page + wide).to(tl.int64) * HEADS + head) * VECTORS + v
                    x = tl.load(
                        stored_ptr + index[:, None] * HEAD_SIZE + dim[None, :],
                        mask=exists_wide[:, None] & (dim < HEAD_SIZE)[None, :],
                        other=0.0,
                    )
                    of_product = tl.where(which == v, of_score, 0.0)
                    of_product = tl.where(is_first, of_product[:, :, None], 0.0)
                    of_product = tl.reshape(of_product, (TOKENS * PADDED, PAGES * ROOM))
                    if scales_ptr is not None:
                        of_product *= tl.load(scales_ptr + index, mask=exists_wide, other=0.0)[None, :]
                    result += tl.dot(of_product.to(x.dtype), x, input_precision="ieee")
    dim = tl.arange(0, DIMS)
    tl.store(
        query_gradient_ptr + of_row[:, None] * HEAD_SIZE + dim[None, :],
        result.to(query_gradient_ptr.dtype.element_ty),
        mask=exists[:, None] & (dim < HEAD_SIZE)[None, :],
    )


@triton.jit
def _key_gradient(
    query_ptr,
    key_ptr,
    value_ptr,
    stored_ptr,
    scales_ptr,
    spread_ptr,
    threshold_ptr,
    last_tie_ptr,
    gradient_ptr,
    log_sum_ptr,
    product_ptr,
    key_gradient_ptr,
    value_gradient_ptr,
    vectors_gradient_ptr,
    spread_gradient_ptr,
    start_ptr,
    begin_ptr,
    length_ptr,
    first_page_ptr,
    scale,
    slope,
    std_weight,
    dense_tokens,
    budget,
    sink_pages,
    recent_pages,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    VECTORS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    HARD: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    at, begin, length = tl.load(start_ptr + tile), tl.load(begin_ptr + tile), tl.load(length_ptr + tile)
    first_page = tl.load(first_page_ptr + tile)
    page = at // PAGE_SIZE + tl.arange(0, PAGES)
    of_page = page < length // PAGE_SIZE
    other = at + tl.arange(0, PAGES * PAGE_SIZE)
    key = _of_heads(key_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
    value = _of_heads(value_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
    of_key = tl.zeros((PAGES * PAGE_SIZE, DIMS), tl.float32)
    of_value = tl.zeros((PAGES * PAGE_SIZE, DIMS), tl.float32)
    of_spread = tl.zeros((PAGES,), tl.float32)
    of_vectors = ()
    if not HARD:
        for _ in tl.static_range(VECTORS):
            of_vectors = of_vectors + (tl.zeros((PAGES, DIMS), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for start in range(at // TOKENS * TOKENS, length, TOKENS):
        token = start + tl.arange(0, TOKENS)
        position, group_head, exists, query, norm = _tile_rows(query_ptr, start, begin, length, head, std_weight, HEADS,
                                                               GROUP, PADDED, TOKENS, HEAD_SIZE, DIMS)  # fmt: skip
        threshold, last_tie = _bounds(threshold_ptr, last_tie_ptr, begin, token, length, head, HEADS)
        scores, which = _row_scores(query, norm, first_page + page, of_page, head, HEADS, stored_ptr, scales_ptr,
                                    spread_ptr, VECTORS, HEAD_SIZE, DIMS)  # fmt: skip
        best = _of_group(scores, group_head, TOKENS, PADDED, GROUP, HARD)
        always = _always(page, token + 1, dense_tokens, budget, sink_pages, recent_pages, PAGE_SIZE)
        log_m, share = _log_mask(best, always, page, threshold, last_tie, slope, HARD)
        if tl.max(tl.max(log_m, axis=1), axis=0) > float("-inf"):
            gradient = _rows(gradient_ptr, begin + position, group_head, exists, HEADS * GROUP * HEAD_SIZE, head,
                             GROUP, HEAD_SIZE, DIMS)  # fmt: skip
            of_row = (begin + position).to(tl.int64) * (HEADS * GROUP) + head * GROUP + group_head
            log_sum = tl.load(log_sum_ptr + of_row, mask=exists, other=0.0)
            product = tl.load(product_ptr + of_row, mask=exists, other=0.0)
            logit = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * _LOG2E)
            logit += _by_row(log_m * _LOG2E, TOKENS, PADDED, PAGES, PAGE_SIZE)
            seen = (other[None, :] <= position[:, None]) & exists[:, None]
            weight = tl.where(seen, tl.exp2(logit - log_sum[:, None]), 0.0)
            of_value += tl.dot(tl.trans(weight.to(gradient.dtype)), gradient, input_precision="ieee")
            of_weight = tl.dot(gradient, tl.trans(value), input_precision="ieee")
            of_logit = weight * (of_weight - product[:, None])
            of_key += tl.dot(tl.trans(of_logit.to(query.dtype)), query, input_precision="ieee")
            if not HARD:
                of_score = _score_gradients(of_logit, scores, which, group_head, share, TOKENS, PADDED, PAGES,
                                            PAGE_SIZE, GROUP)  # fmt: skip
                of_spread += tl.sum(of_score * norm[:, None], axis=0)
                added = ()
                for v in tl.static_range(VECTORS):
                    of_product = tl.trans(tl.where(which == v, of_score, 0.0).to(query.dtype))
                    x = of_vectors[v] + tl.dot(of_product, query, input_precision="ieee")
                    added = added + (x,)  # type: ignore[assignment]  # noqa: RUF005 - Triton's tuples only add
                of_vectors = added
    dim = tl.arange(0, DIMS)
    place = ((begin + other).to(tl.int64) * HEADS + head)[:, None] * HEAD_SIZE + dim[None, :]
    mask = (other < length)[:, None] & (dim < HEAD_SIZE)[None, :]
    tl.store(key_gradient_ptr + place, (of_key * scale).to(key_gradient_ptr.dtype.element_ty), mask=mask)
    tl.store(value_gradient_ptr + place, of_value.to(value_gradient_ptr.dtype.element_ty), mask=mask)
    if not HARD:
        of_head = (first_page + page).to(tl.int64) * HEADS + head
        mask = of_page[:, None] & (dim < HEAD_SIZE)[None, :]
        for v in tl.static_range(VECTORS):
            place = (of_head * VECTORS + v)[:, None] * HEAD_SIZE + dim[None, :]
            tl.store(vectors_gradient_ptr + place, of_vectors[v], mask=mask)
        if spread_gradient_ptr is not None:
            tl.store(spread_gradient_ptr + of_head, of_spread, mask=of_page)


@dataclass(frozen=True)
class _Call:
    """What the kernels of one call share."""

    packing: Packing
    mask: PageMask
    scale: float
    num_kv_heads: int
    group_size: int
    vectors: int
    head_size: int

    @property
    def padded_group(self) -> int:
        """Rows of a token."""
        return int(triton.next_power_of_2(self.group_size))

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return max(64 // self.padded_group, 1)

    @property
    def keys(self) -> int:
        """Keys that a tile meets at a time."""
        return max(64 if self.head_size <= 128 else 32, self.mask.page_size)

    @property
    def room(self) -> int:
        """Numbers of a product that sums over pages for each of them."""
        return max(16 * self.mask.page_size // self.keys, 1)

    def shape(self) -> dict[str, Any]:
        """Returns what the kernels are compiled for."""
        return {
            "HEADS": self.num_kv_heads,
            "GROUP": self.group_size,
            "PADDED": self.padded_group,
            "TOKENS": self.tokens,
            "PAGES": self.keys // self.mask.page_size,
            "PAGE_SIZE": self.mask.page_size,
            "VECTORS": self.vectors,
            "HEAD_SIZE": self.head_size,
            "DIMS": max(triton.next_power_of_2(self.head_size), 16),
            "HARD": self.mask.is_hard,
        }

    def numbers(self) -> tuple[float | int, ...]:
        """Returns the numbers that the kernels which attend end with."""
        selection = self.mask.selection
        slope = self.scale / self.mask.temperature if self.mask.temperature else 0.0
        return (
            self.scale, slope, selection.std_weight, self.mask.dense_tokens, selection.k, selection.sink_pages,
            selection.recent_pages,
        )  # fmt: skip

    def tiles(self, tokens: int, device: torch.device) -> Tiles:
        """Returns the sequences in pieces of so many tokens."""
        return self.packing.tiles(tokens, self.mask.page_size, device)


def _find_thresholds(
    call: _Call, query: torch.Tensor, records: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tau of each token and KV head (with the hard mask S_(K)), and the last page among its equals."""
    selection, page_size = call.mask.selection, call.mask.page_size
    threshold = query.new_zeros((query.shape[0], call.num_kv_heads), dtype=torch.float32)
    last_tie = torch.zeros_like(threshold, dtype=torch.int32)
    width = max(call.packing.lengths) // page_size
    if width <= selection.k:
        return threshold, last_tie
    tiles, pages = call.tiles(call.tokens, query.device), 64
    at_once = max(_SCORES_AT_ONCE // (call.tokens * call.num_kv_heads * width), 1)
    shape = call.shape() | {"PAGES": pages}
    common = {name: shape[name] for name in ("HEADS", "TOKENS", "PAGE_SIZE", "HARD")}
    for first in range(0, len(tiles.start), at_once):
        start, begin, length, first_page = (part[first : first + at_once] for part in tiles)
        scores = query.new_empty((len(start) * call.tokens, call.num_kv_heads, width), dtype=torch.float32)
        _page_scores[(len(start), call.num_kv_heads, triton.cdiv(width, pages))](
            query, *records, start, begin, length, first_page, scores, width, selection.std_weight, **shape
        )
        _thresholds[(len(scores), call.num_kv_heads)](
            scores, start, begin, length, threshold, last_tie, width, call.mask.dense_tokens, selection.k,
            selection.sink_pages, selection.recent_pages, **common, WIDTH=triton.next_power_of_2(width),
            num_warps=4 if width <= 2048 else 16,
        )  # fmt: skip
    return threshold, last_tie


class _MaskedAttention(torch.autograd.Function):
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
        call: _Call,
    ) -> torch.Tensor:
        records = (stored.to(query.dtype).contiguous(), scales, spread)
        threshold, last_tie = _find_thresholds(call, query, records)
        output = torch.empty_like(query)
        log_sum = query.new_empty(query.shape[:2], dtype=torch.float32)
        tiles = call.tiles(call.tokens, query.device)
        _forward[(len(tiles.start), call.num_kv_heads)](
            query, key, value, *records, threshold, last_tie, output, log_sum, *tiles, *call.numbers(), **call.shape(),
            num_warps=4, num_stages=2,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, *records, threshold, last_tie, output, log_sum)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, stored, scales, spread, threshold, last_tie, output, log_sum = ctx.saved_tensors
        call: _Call = ctx.call
        gradient = gradients[0].contiguous()
        product = (gradient.float() * output.float()).sum(dim=-1)
        inputs = (query, key, value, stored, scales, spread, threshold, last_tie, gradient, log_sum, product)
        of_query, of_key, of_value = (torch.empty_like(x) for x in (query, key, value))
        of_vectors = torch.zeros_like(stored, dtype=torch.float32)
        of_spread = None if spread is None else torch.zeros_like(spread)
        tiles = call.tiles(call.tokens, query.device)
        _query_gradient[(len(tiles.start), call.num_kv_heads)](
            *inputs, of_query, *tiles, *call.numbers(), **call.shape(), ROOM=call.room, num_warps=4, num_stages=1
        )
        tiles = call.tiles(call.keys, query.device)
        _key_gradient[(len(tiles.start), call.num_kv_heads)](
            *inputs, of_key, of_value, of_vectors, of_spread, *tiles, *call.numbers(), **call.shape(),
            num_warps=4, num_stages=1,
        )  # fmt: skip
        return of_query, of_key, of_value, of_vectors, of_spread, None, None, None


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
    group_size, vectors = query.shape[1] // num_kv_heads, records.vectors.shape[2]
    call = _Call(packing, mask, scale, num_kv_heads, group_size, vectors, head_size)
    output: torch.Tensor = _MaskedAttention.apply(
        query.contiguous(), key.contiguous(), value.contiguous(), records.vectors,
        None if records.spread is None else records.spread.contiguous(), records.stored, records.scales, call,
    )  # fmt: skip
    return output
