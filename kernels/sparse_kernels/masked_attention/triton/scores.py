"""Scores of pages on a GPU, and shared parts of the kernels of both masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparse_kernels.masked_attention.packing import Packing, Tiles
from sparse_kernels.masked_attention.rule import PageMask

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)
"""Less than any logit and finite, so that an empty tile makes no NaN."""
_BYTES_AT_ONCE = 1 << 30
"""Memory for page scores at a time. With less, the parts of long contexts have too few tokens, so their kernels
have too few programs for a large GPU."""
_SCORING_ROWS, _SCORING_TOKENS, _SCORING_PAGES = 128, 32, 32
"""Query heads that a program scores pages for, the largest number of their tokens, and the pages of one step. They fit
99 KB of shared memory."""
PIECE = 128
"""Tokens of the pieces that sequences are cut into. A program handles a piece or a part of a piece."""
PIECES = ["start_ptr", "begin_ptr", "length_ptr", "first_page_ptr"]
"""Pointers into the pieces. They may have any alignment, so Triton must not specialise kernels on them."""
Records = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Vectors of the dtype of queries `[num_pages, num_kv_heads, vectors, head_size]`, scales and spreads."""


@triton.jit
def rows(pointer, token, group_head, exists, heads_stride, HEAD, GROUP, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr):
    """Loads the rows of a tile: `[ROWS, DIMS]`, zero where a row does not exist."""
    dim = tl.arange(0, DIMS)
    place = token.to(tl.int64) * heads_stride + (HEAD * GROUP + group_head) * HEAD_SIZE
    return tl.load(
        pointer + place[:, None] + dim[None, :], mask=exists[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0
    )


@triton.jit
def columns(pointer, token, exists, head, column, HEADS, HEAD_SIZE: tl.constexpr):
    """Loads some columns of keys or values of a KV head: `[len(token), len(column)]`, zero for missing tokens."""
    place = (token.to(tl.int64) * HEADS + head) * HEAD_SIZE
    return tl.load(
        pointer + place[:, None] + column[None, :], mask=exists[:, None] & (column < HEAD_SIZE)[None, :], other=0.0
    )


@triton.jit
def of_heads(pointer, token, exists, head, HEADS, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr):
    """Loads keys or values of a KV head: `[len(token), DIMS]`, zero where a token does not exist."""
    return columns(pointer, token, exists, head, tl.arange(0, DIMS), HEADS, HEAD_SIZE)


@triton.jit
def keys_and_values(key_ptr, value_ptr, token, exists, head, HEADS, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr):
    """Loads keys and values of a KV head: `[len(token), DIMS]` each, zero where a token does not exist."""
    key = of_heads(key_ptr, token, exists, head, HEADS, HEAD_SIZE, DIMS)
    return key, of_heads(value_ptr, token, exists, head, HEADS, HEAD_SIZE, DIMS)


@triton.jit
def row_places(token, group_head, head, HEADS, GROUP):
    """Returns the offsets of the values of query heads of tokens."""
    return token.to(tl.int64) * (HEADS * GROUP) + head * GROUP + group_head


@triton.jit
def tile_of(start_ptr, begin_ptr, length_ptr, first_page_ptr, TOKENS: tl.constexpr, PIECE: tl.constexpr):
    """Returns a program's first position and the place of its sequence. The longest contexts come first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    piece = tile // (PIECE // TOKENS)
    start = tl.load(start_ptr + piece) + tile % (PIECE // TOKENS) * TOKENS
    return start, tl.load(begin_ptr + piece), tl.load(length_ptr + piece), tl.load(first_page_ptr + piece)


@triton.jit
def count_true(flags):
    """Returns the number of true elements of `[rows, columns]`."""
    return tl.sum(tl.sum(flags.to(tl.int32), axis=0), axis=0)


@triton.jit
def reached_by(key, number, least):
    """Returns a value that exactly `number` of the keys `[rows, columns]` reach; if ties leave none, the largest value
    that more keys reach. It is at least `least`.

    `number` is at most the number of rows.
    """
    # Each row has a key that is at least the smallest of the rows' maxima.
    largest = tl.max(key, axis=1)
    low, high = tl.maximum(tl.min(largest, axis=0), least), tl.max(largest, axis=0) + 1
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)
        count = count_true(key >= middle)
        low = tl.where(count >= number, middle, low)
        high = tl.where(count > number, high, tl.where(count == number, middle + 1, middle))
    return low


@triton.jit
def norms(query, std_weight):
    """Returns the norms of rows times lambda."""
    query = query.to(tl.float32)
    return tl.sqrt_rn(tl.sum(query * query, axis=1)) * std_weight


@triton.jit
def tile_rows(
    query_ptr,
    start,
    begin,
    length,
    head,
    HEADS,
    GROUP,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Returns the position, the head in the group, the existence and the query of each row of a tile."""
    row = tl.arange(0, TOKENS * PADDED)
    position, group_head = start + row // PADDED, row % PADDED
    exists = (position < length) & (group_head < GROUP)
    query = rows(query_ptr, begin + position, group_head, exists, HEADS * GROUP * HEAD_SIZE, head, GROUP,
                 HEAD_SIZE, DIMS)  # fmt: skip
    return position, group_head, exists, query


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
    """Scores pages for each row. Returns the scores and the first vectors that reach them, `[ROWS, PAGES]`."""
    # One product serves all vectors. Vectors of a page lie as far apart as a tile has pages: one thread holds them all.
    number = tl.arange(0, VECTORS)
    index = (page.to(tl.int64) * HEADS + head)[None, :] * VECTORS + number[:, None]
    index = tl.reshape(index, (VECTORS * page.shape[0],))
    of_vector = tl.reshape(tl.broadcast_to(exists[None, :], (VECTORS, page.shape[0])), (VECTORS * page.shape[0],))
    dim = tl.arange(0, DIMS)
    x = tl.load(
        stored_ptr + index[:, None] * HEAD_SIZE + dim[None, :],
        mask=of_vector[:, None] & (dim < HEAD_SIZE)[None, :],
        other=0.0,
    )
    # Values needed after the product are loaded before it, to hide the latency.
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + index, mask=of_vector, other=0.0)
    if spread_ptr is not None:
        spread = tl.load(spread_ptr + page.to(tl.int64) * HEADS + head, mask=exists, other=0.0)
    scores = tl.dot(query, tl.trans(x), input_precision="ieee")
    if scales_ptr is not None:
        scores *= scale[None, :]
    scores = tl.reshape(scores, (query.shape[0], VECTORS, page.shape[0]))
    best = tl.max(scores, axis=1)
    which = tl.min(tl.where(scores == best[:, None, :], number[None, :, None], VECTORS), axis=1)
    if spread_ptr is not None:
        best += norm[:, None] * spread[None, :]
    return best, which


@triton.jit
def _of_group(
    scores,
    which,
    group_head,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Returns the largest scores over the rows of each token, and the first head times `VECTORS` plus the vector."""
    scores = tl.where((group_head < GROUP)[:, None], scores, float("-inf"))
    number = tl.reshape(group_head[:, None] * VECTORS + which, (TOKENS, PADDED, scores.shape[1]))
    scores = tl.reshape(scores, (TOKENS, PADDED, scores.shape[1]))
    best = tl.max(scores, axis=1)
    return best, tl.min(tl.where(scores == best[:, None, :], number, PADDED * VECTORS), axis=1)


@triton.jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=PIECES)
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
    winners_ptr,
    first_token,
    width,
    std_weight,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    VECTORS: tl.constexpr,
    PIECE: tl.constexpr,
):
    head = tl.program_id(1)
    start, begin, length, first_page = tile_of(start_ptr, begin_ptr, length_ptr, first_page_ptr, TOKENS, PIECE)
    if start >= length:
        return
    complete = tl.minimum(start + TOKENS, length) // PAGE_SIZE
    _position, group_head, _exists, query = tile_rows(query_ptr, start, begin, length, head, HEADS, GROUP, PADDED,
                                                      TOKENS, HEAD_SIZE, DIMS)  # fmt: skip
    norm = norms(query, std_weight)
    token = start + tl.arange(0, TOKENS)
    out = ((begin - first_token + token).to(tl.int64) * HEADS + head) * width
    for at in range(0, complete, PAGES):
        page = at + tl.arange(0, PAGES)
        scores, which = _row_scores(query, norm, first_page + page, page < complete, head, HEADS, stored_ptr,
                                    scales_ptr, spread_ptr, VECTORS, HEAD_SIZE, DIMS)  # fmt: skip
        best, winners = _of_group(scores, which, group_head, TOKENS, PADDED, GROUP, VECTORS)
        place, exists = out[:, None] + page[None, :], (token < length)[:, None] & (page < complete)[None, :]
        tl.store(scores_ptr + place, best.to(scores_ptr.dtype.element_ty), mask=exists)
        if winners_ptr is not None:
            tl.store(winners_ptr + place, winners.to(tl.int16), mask=exists)


@triton.jit
def _row_products(
    gradient_ptr, output_ptr, products_ptr, num_rows, ROWS: tl.constexpr, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    place = row[:, None] * HEAD_SIZE + dim[None, :]
    mask = (row < num_rows)[:, None] & (dim < HEAD_SIZE)[None, :]
    gradient = tl.load(gradient_ptr + place, mask=mask, other=0.0).to(tl.float32)
    output = tl.load(output_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(products_ptr + row, tl.sum(gradient * output, axis=1), mask=row < num_rows)


def row_products(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Returns the dot product of each row's output and gradient: `[num_tokens, num_query_heads]` float32."""
    head_size, rows_at_once = output.shape[2], 32
    products = output.new_empty(output.shape[:2], dtype=torch.float32)
    _row_products[(triton.cdiv(products.numel(), rows_at_once),)](
        gradient, output, products, products.numel(), ROWS=rows_at_once, HEAD_SIZE=head_size,
        DIMS=triton.next_power_of_2(head_size),
    )  # fmt: skip
    return products


@dataclass(frozen=True)
class Call:
    """Arguments shared by the kernels of one call."""

    packing: Packing
    mask: PageMask
    scale: float
    num_kv_heads: int
    group_size: int
    vectors: int
    head_size: int

    @property
    def padded_group(self) -> int:
        """Rows per token."""
        return int(triton.next_power_of_2(self.group_size))

    def tokens(self, rows: int) -> int:
        """Returns the tokens of a tile of `rows` rows."""
        return max(rows // self.padded_group, 1)

    def heads(self) -> dict[str, int]:
        """Returns the numbers of heads and pages that every kernel is compiled with."""
        return {
            "HEADS": self.num_kv_heads,
            "GROUP": self.group_size,
            "PAGE_SIZE": self.mask.page_size,
            "HEAD_SIZE": self.head_size,
            "DIMS": max(triton.next_power_of_2(self.head_size), 16),
        }

    def of_pages(self, width: int) -> dict[str, int]:
        """Returns the compile-time constants and warps of a kernel that selects among `width` scores of a token."""
        selection, padded = self.mask.selection, int(triton.next_power_of_2(width))
        chosen = triton.next_power_of_2(selection.k - selection.sink_pages - selection.recent_pages)
        return {
            "HEADS": self.num_kv_heads,
            "PAGE_SIZE": self.mask.page_size,
            "WIDTH": padded,
            "GROUPS": min(chosen, padded),
            "PIECE": PIECE,
            "num_warps": min(max(padded // 1024, 1), 16),
        }

    def tiles(self, tokens: int, device: torch.device) -> Tiles:
        """Returns the sequences in pieces of `tokens` tokens."""
        return self.packing.tiles(tokens, self.mask.page_size, device)


class Part(NamedTuple):
    """The scores of consecutive tokens."""

    scores: torch.Tensor
    """`[num_tokens, num_kv_heads, width]`, undefined at pages that are not complete before the token. `width`
    is at least the largest number of complete pages before one of the tokens."""
    winners: torch.Tensor | None
    """`[num_tokens, num_kv_heads, width]` int16: the first head of the group that has the page's score, times the
    number of vectors, plus the first such vector."""
    pieces: Tiles
    """The pieces of `PIECE` tokens that these tokens form."""
    first_token: int
    """The first token."""


def scores_in_parts(
    call: Call, query: torch.Tensor, records: Records, dtype: torch.dtype, with_winners: bool = False
) -> Iterator[Part]:
    """Computes the scores of all pages for some tokens at a time, in scratch of a fixed size, last tokens first.

    Args:
        call: the arguments of the call.
        query: `[num_tokens, num_query_heads, head_size]`.
        records: vectors, scales and spreads of all pages.
        dtype: of the scores; serving rounds them to bfloat16.
        with_winners: whether to return the head and vector with the largest product.

    Yields:
        A part of the tokens. The next part reuses its memory.
    """
    halves = 1 if call.head_size <= 128 else 2
    tokens, pages = min(call.tokens(_SCORING_ROWS // halves), _SCORING_TOKENS), _SCORING_PAGES // halves
    pieces, on_host = (call.tiles(PIECE, device) for device in (query.device, torch.device("cpu")))
    ends = torch.minimum(on_host.start + PIECE, on_host.length)
    # Round up to whole vector loads.
    widths = (ends // call.mask.page_size + 15) // 16 * 16
    most = widths.clamp(min=16).cummax(0).values
    of_page = call.num_kv_heads * (dtype.itemsize + (torch.int16.itemsize if with_winners else 0))
    parts, end, last_token = [], len(ends), query.shape[0]
    while end > 0:
        first = max(end - max(_BYTES_AT_ONCE // (PIECE * of_page * int(most[end - 1])), 1), 0)
        first_token = int(on_host.begin[first] + on_host.start[first])
        shape = (last_token - first_token, call.num_kv_heads, max(int(widths[first:end].max()), 16))
        parts.append((first, end, first_token, shape))
        end, last_token = first, first_token
    size = max(prod(shape) for *_, shape in parts)
    room = query.new_empty(size, dtype=dtype)
    room_of_winners = query.new_empty(size, dtype=torch.int16) if with_winners else None
    for first, end, first_token, shape in parts:
        part = Tiles(*(numbers[first:end] for numbers in pieces))
        scores = room[: prod(shape)].view(shape)
        winners = None if room_of_winners is None else room_of_winners[: prod(shape)].view(shape)
        _page_scores[((end - first) * (PIECE // tokens), call.num_kv_heads)](
            query, *records, *part, scores, winners, first_token, shape[2], call.mask.selection.std_weight,
            **call.heads(), PADDED=call.padded_group, TOKENS=tokens, PAGES=pages, VECTORS=call.vectors, PIECE=PIECE,
            num_warps=8, num_stages=2, maxnreg=128,
        )  # fmt: skip
        yield Part(scores, winners, part, first_token)
