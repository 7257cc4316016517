"""Lists the pages that tokens read under the hard mask, and the readers of each page, on a GPU.

1. Scores are computed for some tokens at a time. Each token and KV head writes the list of its pages, its incomplete
   page included. One rule then holds for all listed pages: a token sees the keys that do not come after it.
2. One stable sort inverts the lists into pairs of a token and a page, ordered by page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparse_kernels.masked_attention.triton.scores import (
    PIECE,
    PIECES,
    Call,
    Records,
    count_true,
    reached_by,
    scores_in_parts,
)

PART_READERS = 256
"""Readers of a page that one program handles."""


@triton.jit
def _numbered(flags):
    """Numbers the true elements from 1 on, column by column."""
    flags = flags.to(tl.int32)
    in_column = tl.sum(flags, axis=0)
    return tl.cumsum(flags, axis=0) + (tl.cumsum(in_column, axis=0) - in_column)[None, :]


@triton.jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=PIECES)
def _list_pages(
    scores_ptr,
    start_ptr,
    begin_ptr,
    length_ptr,
    lists_ptr,
    counts_ptr,
    first_token,
    num_tokens,
    width,
    list_width,
    dense_tokens,
    budget,
    sink_pages,
    recent_pages,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECE: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(start_ptr + row // PIECE) + row % PIECE
    if position >= tl.load(length_ptr + row // PIECE):
        return
    token = tl.load(begin_ptr + row // PIECE) + position
    begin = token - position
    complete = (position + 1) // PAGE_SIZE
    # Consecutive pages lie along the first axis, so that a thread numbers many of them.
    page = tl.arange(0, GROUPS)[:, None] + tl.arange(0, WIDTH // GROUPS)[None, :] * GROUPS
    read = page < complete
    if (complete > budget) & (position >= dense_tokens):
        candidate = (page >= sink_pages) & (page < complete - recent_pages)
        row_ptr = scores_ptr + ((token - first_token).to(tl.int64) * HEADS + head) * width
        score = tl.load(row_ptr + page, mask=candidate, other=0.0)
        # The order of these integers, from 1 to 2^16, is that of the scores; 0 and -0 are equal.
        bits = (score.to(tl.float32) + 0.0).to(tl.int32, bitcast=True) >> 16
        key = tl.where(candidate, tl.where(bits < 0, bits ^ 0x7FFF, bits) + 0x8001, 0)
        left = budget - sink_pages - recent_pages
        low = reached_by(key, left, 1)
        equal = key == low
        left -= count_true(key > low)
        kept = (key > low) | (equal & (_numbered(equal) <= left))
        read = read & (kept | (page < sink_pages) | (page >= complete - recent_pages))
    place, count = _numbered(read) - 1, count_true(read)
    first = head * (num_tokens + 1)
    of_list = head.to(tl.int64) * num_tokens + token
    out = lists_ptr + of_list * list_width
    tl.store(out + place, first + begin + page * PAGE_SIZE, mask=read)
    if (position + 1) % PAGE_SIZE != 0:
        tl.store(out + count, first + begin + complete * PAGE_SIZE)
        count += 1
    tl.store(counts_ptr + of_list, count)
    for at in range(count, list_width, 64):
        slot = at + tl.arange(0, 64)
        tl.store(out + slot, tl.zeros((64,), tl.int32) + first + num_tokens, mask=slot < list_width)


class Readers(NamedTuple):
    """The readers of each page: pairs of a token and a page, ordered by KV head, page and token."""

    pair: torch.Tensor
    """`token * width` plus the page's place in the token's list: `[num_kv_heads, num_tokens * width]` int32. Places
    without a page follow the pairs of a head."""
    pairs_from: torch.Tensor
    """The first pair of each page in its row of `pair`, then the end of the pairs:
    `[num_kv_heads, num_pages + 1]` int32."""
    parts_from: torch.Tensor
    """The first part of each page, counted within its head, then the number of parts:
    `[num_kv_heads, num_pages + 1]` int32. A part has at most `PART_READERS` pairs."""
    page_of_part: torch.Tensor
    """`[num_kv_heads, most_parts]` int32; `num_pages` beyond the last part."""
    page_start: torch.Tensor
    """The first token of each page, and after them `num_tokens`: `[num_pages + 1]` int32."""


def list_width(call: Call) -> int:
    """Returns the largest number of pages that a token reads, the incomplete page included."""
    complete = max(call.packing.lengths) // call.mask.page_size
    return min(complete, max(call.mask.selection.k, call.mask.dense_tokens // call.mask.page_size)) + 1


def list_all(call: Call, query: torch.Tensor, records: Records) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the pages that each token and KV head reads, as in serving.

    Returns:
        Lists `[num_kv_heads, num_tokens, width]` int32 in text order. An entry is `head * (num_tokens + 1)` plus the
        first token of a page, or plus `num_tokens` beyond the last page. And the number of pages of each list,
        `[num_kv_heads, num_tokens]` int32.
    """
    selection, num_tokens = call.mask.selection, query.shape[0]
    lists = query.new_empty((call.num_kv_heads, num_tokens, list_width(call)), dtype=torch.int32)
    counts = query.new_empty((call.num_kv_heads, num_tokens), dtype=torch.int32)
    for scores, _, (start, begin, length, _), first_token in scores_in_parts(call, query, records, torch.bfloat16):
        width = scores.shape[2]
        _list_pages[(len(start) * PIECE, call.num_kv_heads)](
            scores, start, begin, length, lists, counts, first_token, num_tokens, width, lists.shape[2],
            call.mask.dense_tokens, selection.k, selection.sink_pages, selection.recent_pages, **call.of_pages(width),
        )  # fmt: skip
    return lists, counts


def invert(call: Call, lists: torch.Tensor) -> Readers:
    """Returns the readers of each page without waiting for the device."""
    num_heads, num_tokens, width = lists.shape
    starts = call.packing.page_starts(call.mask.page_size, lists.device)
    head = torch.arange(num_heads, device=lists.device, dtype=torch.int32)[:, None]
    first = head.long() * (num_tokens * width)
    pages, pair = lists.view(-1).sort(stable=True)
    pairs_from = torch.searchsorted(pages, head * (num_tokens + 1) + starts) - first
    parts = (pairs_from.diff(dim=1) + (PART_READERS - 1)) // PART_READERS
    parts_from = torch.nn.functional.pad(parts.cumsum(1), (1, 0))
    numbers = torch.arange(len(starts) + num_tokens * width // PART_READERS, device=lists.device)
    page_of_part = torch.searchsorted(parts_from, numbers.expand(num_heads, -1).contiguous(), right=True) - 1
    pair = pair.view(num_heads, -1) - first
    return Readers(pair.int(), pairs_from.int(), parts_from.int(), page_of_part.int(), starts)
