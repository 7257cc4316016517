"""Attends under the soft mask on a GPU, in the manner of FlashAttention."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.masked_attention.triton.launches import Launch, grid, keys_shape
from sparse_kernels.masked_attention.triton.mask import load_pages, repeated, soft_parts
from sparse_kernels.masked_attention.triton.scores import (
    LOG2E,
    NOTHING,
    PIECE,
    PIECES,
    Call,
    Records,
    keys_and_values,
    row_places,
    tile_of,
    tile_rows,
)

_FORWARD = Launch(rows=128, columns=64, num_warps=8, num_stages=3)


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
    """Attends to a range of keys. All keys are before the rows, or some are."""
    for key_at in range(at, end, KEYS):
        other = key_at + tl.arange(0, KEYS)
        key, value = keys_and_values(key_ptr, value_ptr, begin + other, other < length, head, HEADS, HEAD_SIZE, DIMS)
        page = key_at // PAGE_SIZE + tl.arange(0, KEYS // PAGE_SIZE)
        bias = load_pages(bias_ptr, begin + token, token < length, page, head, first_token, width, HEADS)
        logit = tl.dot(query, tl.trans(key), input_precision="ieee") * scale + repeated(bias, PADDED, PAGE_SIZE)
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
    of_row = row_places(begin + position, group_head, head, HEADS, GROUP)
    tl.store(
        output_ptr + of_row[:, None] * HEAD_SIZE + dim[None, :],
        attended.to(output_ptr.dtype.element_ty),
        mask=exists[:, None] & (dim < HEAD_SIZE)[None, :],
    )
    tl.store(log_sum_ptr + of_row, largest + tl.log2(total), mask=exists)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, records: Records, call: Call
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attends, and keeps what the backward pass needs.

    Args:
        query: `[num_tokens, num_query_heads, head_size]`, contiguous.
        key: `[num_tokens, num_kv_heads, head_size]`, contiguous.
        value: as `key`.
        records: of all complete pages, as in serving.
        call: the arguments of the call.

    Returns:
        The output, like `query`; the logarithms of its denominators, `[num_tokens, num_query_heads]` float32; and the
        thresholds of the mask, `[num_tokens, num_kv_heads]` float32.
    """
    threshold = query.new_empty((query.shape[0], call.num_kv_heads), dtype=torch.float32)
    output = torch.empty_like(query)
    log_sum = query.new_empty(query.shape[:2], dtype=torch.float32)
    shape = keys_shape(call, _FORWARD, query.device)
    for bias, _, pieces, first_token in soft_parts(call, query, records, threshold, is_found=False):
        _forward[grid(call, pieces, shape)](
            query, key, value, bias, output, log_sum, *pieces, first_token, bias.shape[2], call.scale, **shape,
            PIECE=PIECE,
        )  # fmt: skip
    return output, log_sum, threshold
