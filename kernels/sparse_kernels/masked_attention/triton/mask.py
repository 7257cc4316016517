"""Turns the scores of pages into log m of the soft mask on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from sparse_kernels.masked_attention.triton.scores import (
    LOG2E,
    PIECE,
    PIECES,
    Call,
    Part,
    Records,
    count_true,
    reached_by,
    scores_in_parts,
)


@triton.jit
def repeated(x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Repeats each element FIRST and SECOND times along the two axes."""
    x = tl.broadcast_to(x[:, None, :, None], (x.shape[0], FIRST, x.shape[1], SECOND))
    return tl.reshape(x, (x.shape[0] * FIRST, x.shape[2] * SECOND))


@triton.jit
def load_pages(pointer, token, exists, page, head, first_token, width, HEADS):
    """Loads a part's numbers by token and page: `[TOKENS, PAGES]`, zero where a token or page does not exist."""
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
    """Turns a token's scores into log m to the base 2. Finds and stores the threshold, or loads it."""
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
            # The order of these integers is that of the scores; 0 and -0 are equal.
            bits = (score + 0.0).to(tl.int32, bitcast=True)
            key = tl.where(candidate, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -0x80000000)
            left = budget - sink_pages - recent_pages
            low = reached_by(key, left, -0x7FFFFFFF)
            is_tied = count_true(key >= low) > left
            kept = tl.min(tl.min(tl.where(key >= low, score, float("inf")), axis=0), axis=0)
            below = tl.max(tl.max(tl.where(candidate & (key < low), score, float("-inf")), axis=0), axis=0)
            threshold = 0.5 * (kept + tl.where(is_tied, kept, below))
            tl.store(threshold_ptr, threshold)
        else:
            threshold = tl.load(threshold_ptr)
        x = (score - threshold) * slope
        softly = tl.minimum(x, 0.0) * LOG2E - tl.log2(1.0 + tl.exp2(-tl.abs(x) * LOG2E))
        log_m = tl.where(candidate, softly, 0.0)
    tl.store(row_ptr + page, log_m, mask=page < width)


def soft_parts(
    call: Call, query: torch.Tensor, records: Records, threshold: torch.Tensor, is_found: bool
) -> Iterator[Part]:
    """Yields log m to the base 2 for some tokens at a time, the last ones first.

    Finds and stores tau of each token and KV head, or uses the stored values if `is_found`.
    """
    selection = call.mask.selection
    for part in scores_in_parts(call, query, records, torch.float32, with_winners=is_found):
        width = part.scores.shape[2]
        _soften[(len(part.pieces.start) * PIECE, call.num_kv_heads)](
            part.scores, *part.pieces[:3], threshold, part.first_token, width, slope(call), call.mask.dense_tokens,
            selection.k, selection.sink_pages, selection.recent_pages, **call.of_pages(width), FIND=not is_found,
        )  # fmt: skip
        yield part


def slope(call: Call) -> float:
    """Returns the factor of scores in the mask."""
    assert call.mask.temperature is not None
    return call.scale / call.mask.temperature
