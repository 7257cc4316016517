"""Passes the gradients of scores to queries and records on a GPU: to the head and vector with the largest product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.masked_attention.triton.launches import Launch, grid, vectors_shape
from sparse_kernels.masked_attention.triton.mask import load_pages
from sparse_kernels.masked_attention.triton.scores import (
    PIECE,
    PIECES,
    Call,
    Part,
    Records,
    norms,
    row_places,
    tile_of,
    tile_rows,
)

_SCORED_QUERIES = Launch(rows=128, columns=64, num_warps=8, num_stages=2)
_SCORED_RECORDS = Launch(rows=64, columns=128, num_warps=8, num_stages=2)


@triton.jit
def _of_products(of_score, winner, PADDED: tl.constexpr, VECTORS: tl.constexpr):
    """Returns the gradients of rows' products with vectors: `[ROWS, PAGES * VECTORS]`. Only the winner's is nonzero."""
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
    """Adds the gradients through the scores to the gradients of queries."""
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
        of_score = load_pages(of_scores_ptr, begin + token, token < length, page, head, first_token, width, HEADS)
        winner = load_pages(winners_ptr, begin + token, token < length, page, head, first_token, width, HEADS)
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
    of_row = row_places(begin + position, group_head, head, HEADS, GROUP)
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
    """Adds the gradients through the scores of some tokens to the gradients of vectors and deviations."""
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
        of_score = load_pages(of_scores_ptr, begin + token, token < end, page, head, first_token, width, HEADS)
        winner = load_pages(winners_ptr, begin + token, token < end, page, head, first_token, width, HEADS)
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


def add_score_gradients(
    call: Call,
    part: Part,
    last_token: int,
    query: torch.Tensor,
    records: Records,
    of_query: torch.Tensor,
    of_vectors: torch.Tensor,
    of_spread: torch.Tensor | None,
) -> None:
    """Adds the gradients through the scores of some tokens.

    Args:
        call: the arguments of the call.
        part: the gradients of the scores, in place of the scores, and the winners.
        last_token: one past the last token of the part.
        query: `[num_tokens, num_query_heads, head_size]`.
        records: of all pages.
        of_query: gradients of the queries.
        of_vectors: gradients of the vectors, float32.
        of_spread: gradients of the spreads; None for records without spreads.
    """
    (stored, scales, _), (of_scores, winners, pieces, first_token) = records, part
    width = of_scores.shape[2]
    shape = vectors_shape(call, _SCORED_QUERIES, query.device)
    _scored_queries[grid(call, pieces, shape)](
        stored, scales, of_scores, winners, of_query, *pieces, first_token, width, **shape, PIECE=PIECE
    )
    shape = vectors_shape(call, _SCORED_RECORDS, query.device)
    tiles = call.tiles(shape["PAGES"] * call.mask.page_size, query.device)
    _scored_records[(len(tiles.start), call.num_kv_heads)](
        query, of_scores, winners, of_vectors, of_spread, *tiles, first_token, last_token, width,
        call.mask.selection.std_weight, **shape,
    )  # fmt: skip
