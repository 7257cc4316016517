"""Gradients under the soft mask on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.masked_attention.triton.launches import LAUNCHES, keys_shape
from sparse_kernels.masked_attention.triton.mask import load_pages, repeated, slope, soft_parts
from sparse_kernels.masked_attention.triton.score_gradients import Sums, add_score_gradients, sum_places
from sparse_kernels.masked_attention.triton.scores import (
    LOG2E,
    NOTHING,
    PIECE,
    Call,
    Records,
    keys_and_values,
    numbers_from,
    row_products,
    rows_from,
    tile_rows,
)

_BITS = {2: 30, 4: 46}
"""The bound of a sum of a query's gradient is up to 2^_BITS steps, by the bytes of an element."""
_LEAST_EXPONENT = -64
"""Smaller bounds have the step of 2^_LEAST_EXPONENT, because the number of steps must be finite."""


@triton.jit
def _sum_readers(
    key,
    value,
    other,
    begin,
    head,
    at,
    from_token,
    to_token,
    query_ptr,
    gradient_ptr,
    log_sum_ptr,
    product_ptr,
    bias_ptr,
    steps_ptr,
    sums_ptr,
    first_token,
    width,
    scale,
    slope,
    of_key,
    of_value,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Adds the part of a range of positions to the gradients of keys and values, and the part of the keys to those of
    queries. Replaces log m by the gradients of the scores. All positions are after the keys, or some are."""
    # A product has at least 16 columns, so few pages are summed together with pages that have no keys here.
    pages: tl.constexpr = KEYS // PAGE_SIZE
    sums: tl.constexpr = pages if pages > 16 else 16
    of_page = (tl.arange(0, KEYS)[:, None] // PAGE_SIZE == tl.arange(0, sums)[None, :]).to(key.dtype)
    page, summed = at // PAGE_SIZE + tl.arange(0, pages), at // PAGE_SIZE + tl.arange(0, sums)
    place_in_tile = sum_places(TOKENS * PADDED, DIMS)
    for start in range(from_token, to_token, TOKENS):
        position, _head, exists, query = tile_rows(query_ptr, start, begin, to_token, head, HEADS, GROUP, PADDED,
                                                        TOKENS, HEAD_SIZE, DIMS)  # fmt: skip
        gradient = rows_from(gradient_ptr, begin + start, exists, head, HEADS, GROUP, PADDED, TOKENS, HEAD_SIZE, DIMS)
        token = start + tl.arange(0, TOKENS)
        logit = tl.dot(key, tl.trans(query), input_precision="ieee")
        of_weight = tl.dot(value, tl.trans(gradient), input_precision="ieee")
        bias = load_pages(bias_ptr, begin + token, token < to_token, page, head, first_token, width, HEADS)
        log_m = load_pages(bias_ptr, begin + token, token < to_token, summed, head, first_token, width, HEADS)
        logit = logit * (scale * LOG2E) + repeated(tl.trans(bias), PAGE_SIZE, PADDED)
        # Rows that do not exist get no weight.
        log_sum = numbers_from(log_sum_ptr, begin + start, exists, head, -NOTHING, HEADS, GROUP, PADDED, TOKENS)
        weight = tl.exp2(logit - log_sum[None, :])
        if IS_CAUSAL:
            weight = tl.where(other[:, None] <= position[None, :], weight, 0.0)
        # This product runs while the next values are computed.
        of_value = tl.dot(weight.to(gradient.dtype), gradient, of_value, input_precision="ieee")
        product = numbers_from(product_ptr, begin + start, exists, head, 0.0, HEADS, GROUP, PADDED, TOKENS)
        of_logit = (weight * (of_weight - product[None, :])).to(query.dtype)
        of_key = tl.dot(of_logit, query, of_key, input_precision="ieee")
        by_row = tl.trans(of_logit)
        of_rows = tl.dot(by_row, of_page, input_precision="ieee")
        of_query = tl.dot(by_row, key, input_precision="ieee")
        of_log = tl.sum(tl.reshape(of_rows, (TOKENS, PADDED, sums)), axis=1)
        tl.store(
            bias_ptr + ((begin - first_token + token).to(tl.int64) * HEADS + head)[:, None] * width + summed[None, :],
            of_log * (1.0 - tl.exp2(log_m)) * slope,
            mask=(token < to_token)[:, None] & ((summed < width) & (summed < (at + KEYS) // PAGE_SIZE))[None, :],
        )
        steps = numbers_from(steps_ptr, begin + start, exists, head, 0.0, HEADS, GROUP, PADDED, TOKENS)
        counted = tl.floor(of_query * steps[:, None] + 0.5).to(sums_ptr.dtype.element_ty)
        tile_ptr = sums_ptr + (begin - first_token + start).to(tl.int64) * (PADDED * DIMS)
        tl.atomic_add(tile_ptr + place_in_tile, counted, sem="relaxed")
    return of_key, of_value


@triton.jit(do_not_specialize=["first_token", "last_token"])
def _gradients(
    query_ptr,
    key_ptr,
    value_ptr,
    gradient_ptr,
    log_sum_ptr,
    product_ptr,
    bias_ptr,
    steps_ptr,
    sums_ptr,
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
    slope,
    rows_of_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Adds the part of some tokens to the gradients of keys and values. Adds up the gradients of the tokens' queries
    through the logits. Replaces log m by the gradients of the scores."""
    tile, head = tl.program_id(0), tl.program_id(1)
    at, begin, length = tl.load(start_ptr + tile), tl.load(begin_ptr + tile), tl.load(length_ptr + tile)
    start, end = tl.maximum(at, first_token - begin), tl.minimum(length, last_token - begin)
    if start >= end:
        return
    other = at + tl.arange(0, KEYS)
    key, value = keys_and_values(key_ptr, value_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
    of_key = tl.zeros((KEYS, DIMS), tl.float32)
    of_value = tl.zeros((KEYS, DIMS), tl.float32)
    sums_ptr += head.to(tl.int64) * rows_of_head * DIMS
    middle = tl.minimum(start + tl.cdiv(tl.maximum(at + KEYS - 1 - start, 0), TOKENS) * TOKENS, end)
    of_key, of_value = _sum_readers(
        key, value, other, begin, head, at, start, middle, query_ptr, gradient_ptr, log_sum_ptr, product_ptr, bias_ptr,
        steps_ptr, sums_ptr, first_token, width, scale, slope, of_key, of_value, HEADS, GROUP, PAGE_SIZE, HEAD_SIZE,
        DIMS, PADDED, TOKENS, KEYS, True,
    )  # fmt: skip
    of_key, of_value = _sum_readers(
        key, value, other, begin, head, at, middle, end, query_ptr, gradient_ptr, log_sum_ptr, product_ptr, bias_ptr,
        steps_ptr, sums_ptr, first_token, width, scale, slope, of_key, of_value, HEADS, GROUP, PAGE_SIZE, HEAD_SIZE,
        DIMS, PADDED, TOKENS, KEYS, False,
    )  # fmt: skip
    dim = tl.arange(0, DIMS)
    place = ((begin + other).to(tl.int64) * HEADS + head)[:, None] * HEAD_SIZE + dim[None, :]
    mask = (other < length)[:, None] & (dim < HEAD_SIZE)[None, :]
    of_key = of_key * scale + tl.load(key_gradient_ptr + place, mask=mask, other=0.0)
    tl.store(key_gradient_ptr + place, of_key, mask=mask)
    of_value += tl.load(value_gradient_ptr + place, mask=mask, other=0.0)
    tl.store(value_gradient_ptr + place, of_value, mask=mask)


def _steps_of_rows(call: Call, key: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Returns how many steps of a sum make one, for the gradient of each query: `[num_tokens, num_query_heads]`
    float32, powers of two; NaN for a gradient that is not finite.

    A query's gradient sums w (x - mean of x) k over keys, with weights w and products x = gradient . value. No sum of
    some of its terms exceeds the mean deviation of x times max |k|, which is at most |gradient| max |value| max |k|.
    """
    largest = torch.linalg.vector_norm(value, dim=2, dtype=torch.float32).amax(0) * key.abs().amax((0, 2))
    norms = torch.linalg.vector_norm(gradient, dim=2, dtype=torch.float32)
    bound = norms * largest.repeat_interleave(call.group_size)
    exponent = torch.frexp(bound).exponent.clamp(min=_LEAST_EXPONENT)
    binary_places = _BITS[gradient.dtype.itemsize] - exponent
    steps: torch.Tensor = torch.ldexp(torch.ones_like(bound), binary_places) + bound * 0.0
    return steps


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
    shape = keys_shape(call, LAUNCHES["gradients"], query.device)
    tiles = call.tiles(shape["KEYS"], query.device)
    steps = _steps_of_rows(call, key, value, gradient)
    whole = torch.int32 if query.itemsize == 2 else torch.int64
    last_token = query.shape[0]
    for part in soft_parts(call, query, records, threshold, is_found=True):
        bias, _, _, first_token = part
        # A tile may begin at the last token. Rows that do not exist add zeros.
        room = (triton.cdiv(last_token - first_token, PIECE) + 1) * PIECE
        sums = query.new_zeros((call.num_kv_heads, room, call.padded_group, shape["DIMS"]), dtype=whole)
        _gradients[(len(tiles.start), call.num_kv_heads)](
            *inputs, bias, steps, sums, of_key, of_value, *tiles, first_token, last_token, bias.shape[2], call.scale,
            slope(call), sums[0].numel() // shape["DIMS"], **shape,
        )  # fmt: skip
        add_score_gradients(call, part, last_token, query, records, Sums(sums, steps), of_query, of_vectors, of_spread)
        last_token = first_token
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype), of_vectors, of_spread
