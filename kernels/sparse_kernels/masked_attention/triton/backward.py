"""Gradients under the soft mask on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.masked_attention.triton.launches import Launch, grid, keys_shape
from sparse_kernels.masked_attention.triton.mask import load_pages, repeated, slope, soft_parts
from sparse_kernels.masked_attention.triton.score_gradients import add_score_gradients
from sparse_kernels.masked_attention.triton.scores import (
    LOG2E,
    NOTHING,
    PIECE,
    PIECES,
    Call,
    Records,
    keys_and_values,
    row_places,
    row_products,
    rows,
    tile_of,
    tile_rows,
)

_QUERY_GRADIENT = Launch(rows=128, columns=64, num_warps=8, num_stages=2)
_KEY_GRADIENT = Launch(rows=64, columns=128, num_warps=8, num_stages=2)


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
    """Adds the part of a range of keys to the gradients of queries. The range is all or some keys before the rows.

    Replaces log m by the gradients of the scores of these pages.
    """
    # A product has at least 16 columns, so short ranges are summed together with pages that have no keys here.
    sums: tl.constexpr = KEYS // PAGE_SIZE if KEYS // PAGE_SIZE > 16 else 16
    of_page = (tl.arange(0, KEYS)[:, None] // PAGE_SIZE == tl.arange(0, sums)[None, :]).to(key_ptr.dtype.element_ty)
    place = ((begin - first_token + token).to(tl.int64) * HEADS + head) * width
    for key_at in range(at, end, KEYS):
        other = key_at + tl.arange(0, KEYS)
        key, value = keys_and_values(key_ptr, value_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
        page = key_at // PAGE_SIZE + tl.arange(0, KEYS // PAGE_SIZE)
        summed = key_at // PAGE_SIZE + tl.arange(0, sums)
        log_m = load_pages(bias_ptr, begin + token, token < length, summed, head, first_token, width, HEADS)
        # This order keeps a product running while other values are computed.
        logit = tl.dot(query, tl.trans(key), input_precision="ieee")
        of_weight = tl.dot(gradient, tl.trans(value), input_precision="ieee")
        bias = load_pages(bias_ptr, begin + token, token < length, page, head, first_token, width, HEADS)
        logit = logit * (scale * LOG2E) + repeated(bias, PADDED, PAGE_SIZE)
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
    """Writes the gradients of queries through the logits, and replaces log m by the gradients of the scores."""
    head = tl.program_id(1)
    start, begin, length, _page = tile_of(start_ptr, begin_ptr, length_ptr, first_page_ptr, TOKENS, PIECE)
    if start >= length:
        return
    position, group_head, exists, query = tile_rows(query_ptr, start, begin, length, head, HEADS, GROUP, PADDED, TOKENS,
                                                    HEAD_SIZE, DIMS)  # fmt: skip
    gradient = rows(gradient_ptr, begin + position, group_head, exists, HEADS * GROUP * HEAD_SIZE, head, GROUP,
                    HEAD_SIZE, DIMS)  # fmt: skip
    of_row = row_places(begin + position, group_head, head, HEADS, GROUP)
    # Rows that do not exist get no weight.
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
    """Adds the part of a range of positions to the gradients of keys and values. All positions are after the keys, or
    some are."""
    for start in range(at, end, TOKENS):
        position, group_head, exists, query = tile_rows(query_ptr, start, begin, end, head, HEADS, GROUP, PADDED,
                                                        TOKENS, HEAD_SIZE, DIMS)  # fmt: skip
        gradient = rows(gradient_ptr, begin + position, group_head, exists, HEADS * GROUP * HEAD_SIZE, head, GROUP,
                        HEAD_SIZE, DIMS)  # fmt: skip
        of_row = row_places(begin + position, group_head, head, HEADS, GROUP)
        token = start + tl.arange(0, TOKENS)
        # This order keeps a product running while other values are computed, with registers free for both.
        logit = tl.dot(key, tl.trans(query), input_precision="ieee")
        of_weight = tl.dot(value, tl.trans(gradient), input_precision="ieee")
        bias = load_pages(bias_ptr, begin + token, token < end, page, head, first_token, width, HEADS)
        logit = logit * (scale * LOG2E) + repeated(tl.trans(bias), PAGE_SIZE, PADDED)
        # Rows that do not exist get no weight.
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
    """Adds the part of some tokens to the gradients of keys and values."""
    tile, head = tl.program_id(0), tl.program_id(1)
    at, begin, length = tl.load(start_ptr + tile), tl.load(begin_ptr + tile), tl.load(length_ptr + tile)
    start, end = tl.maximum(at, first_token - begin), tl.minimum(length, last_token - begin)
    if start >= end:
        return
    page = at // PAGE_SIZE + tl.arange(0, KEYS // PAGE_SIZE)
    other = at + tl.arange(0, KEYS)
    key, value = keys_and_values(key_ptr, value_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
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


def gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    records: Records,
    call: Call,
    gradient: torch.Tensor,
    attended: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the gradients of queries, keys, values, vectors and spreads.

    Args:
        query: `[num_tokens, num_query_heads, head_size]`, contiguous.
        key: `[num_tokens, num_kv_heads, head_size]`, contiguous.
        value: as `key`.
        records: of all complete pages, as in serving.
        call: the arguments of the call.
        gradient: of the output, contiguous.
        attended: what `attend` returned.
    """
    stored, _, spread = records
    output, log_sum, threshold = attended
    inputs = (query, key, value, gradient, log_sum, row_products(gradient, output))
    of_query = torch.empty_like(query)
    of_key, of_value, of_vectors = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value, stored))
    of_spread = None if spread is None else torch.zeros_like(spread)
    of_queries, of_keys = (keys_shape(call, launch, query.device) for launch in (_QUERY_GRADIENT, _KEY_GRADIENT))
    key_tiles = call.tiles(of_keys["KEYS"], query.device)
    last_token = query.shape[0]
    for part in soft_parts(call, query, records, threshold, is_found=True):
        bias, _, pieces, first_token = part
        width = bias.shape[2]
        _key_gradient[(len(key_tiles.start), call.num_kv_heads)](
            *inputs, bias, of_key, of_value, *key_tiles, first_token, last_token, width, call.scale, **of_keys
        )
        _query_gradient[grid(call, pieces, of_queries)](
            *inputs, bias, of_query, *pieces, first_token, width, call.scale, slope(call), **of_queries, PIECE=PIECE
        )
        add_score_gradients(call, part, last_token, query, records, of_query, of_vectors, of_spread)
        last_token = first_token
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_vectors, of_spread
