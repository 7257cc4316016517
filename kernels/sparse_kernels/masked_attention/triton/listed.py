"""Attention under the hard mask on a GPU, forward and backward, from lists of the pages that tokens read.

A budget is few pages compared with a context. Therefore only the scores grow with the square of the length.

1. Each token and KV head has a list of its pages. Each page has a list of its readers (`lists.py`). A page's keys and
   values are loaded once for several readers, whose queries are gathered. The queries of a group are a few rows; a page
   has 16 keys and 16 values. This moves far less memory than gathering pages per query.
2. For each reader, a page produces an output with its log-sum, or a gradient of the query. This partial result is
   stored at the page's place in the reader's list. A second kernel reads the lists and joins the partial results. Heads
   are processed in turns: this memory holds one head, or as many heads as fit in `_JOINED_BYTES`.
3. Gradients of keys and values are summed in float32 for each part of a page's readers, then over the parts in order.
   The result does not depend on the launch. A page that every token reads has many parts, which run in parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sparse_kernels.masked_attention.triton.lists import PART_READERS, Readers, invert, list_all, list_width
from sparse_kernels.masked_attention.triton.scores import (
    LOG2E,
    NOTHING,
    Call,
    Records,
    columns,
    keys_and_values,
    row_places,
    row_products,
    rows,
)


class _Launch(NamedTuple):
    """Launch settings of a kernel."""

    rows: int
    """Query heads of tokens, or pages of a list, that a program handles at a time."""
    num_warps: int
    num_stages: int


_OUTPUTS = _Launch(rows=64, num_warps=4, num_stages=2)
_GRADIENTS = _Launch(rows=64, num_warps=4, num_stages=3)
_JOINING = _Launch(rows=32, num_warps=4, num_stages=1)
_JOINED_BYTES = 1 << 30
"""Memory for partial results of pages, unless one head needs more."""


@triton.jit
def _part_of_page(
    pairs_from_ptr,
    parts_from_ptr,
    page_of_part_ptr,
    page_start_ptr,
    part,
    head,
    num_pages,
    most_parts,
    READERS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Returns the pairs of a part, the tokens of its page, and a mask of the page's tokens."""
    page = tl.load(page_of_part_ptr + head * most_parts + part)
    # Parts beyond the last one belong to no page and have no pairs.
    exists = page < num_pages
    place = head * (num_pages + 1) + page
    begin = tl.load(pairs_from_ptr + place) + (part - tl.load(parts_from_ptr + place)) * READERS
    end = tl.minimum(begin + READERS, tl.load(pairs_from_ptr + place + 1, mask=exists, other=0))
    offset = tl.arange(0, KEYS)
    other = tl.load(page_start_ptr + page) + offset
    page_end = tl.load(page_start_ptr + page + 1, mask=exists, other=0)
    return begin, end, other, (offset < PAGE_SIZE) & (other < page_end)


@triton.jit
def _readers(pair_ptr, at, end, WIDTH: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr):
    """Returns the pair, the token and the head in the group for the rows of some readers, and whether each row exists.

    Rows that do not exist repeat the last reader and head. This is cheaper than a masked load.
    """
    row = tl.arange(0, TOKENS * PADDED)
    number, group_head = at + row // PADDED, row % PADDED
    exists = (number < end) & (group_head < GROUP)
    pair = tl.load(pair_ptr + tl.minimum(number, end - 1))
    return pair, pair // WIDTH, tl.minimum(group_head, GROUP - 1), exists


@triton.jit(do_not_specialize=["first_head"])
def _page_outputs(
    query_ptr,
    key_ptr,
    value_ptr,
    pair_ptr,
    pairs_from_ptr,
    parts_from_ptr,
    page_of_part_ptr,
    page_start_ptr,
    outputs_ptr,
    log_sums_ptr,
    first_head,
    num_tokens,
    num_pages,
    most_parts,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    READERS: tl.constexpr,
):
    part, head = tl.program_id(0), first_head + tl.program_id(1)
    begin, end, other, of_page = _part_of_page(pairs_from_ptr, parts_from_ptr, page_of_part_ptr, page_start_ptr, part,
                                               head, num_pages, most_parts, READERS, PAGE_SIZE, KEYS)  # fmt: skip
    if begin >= end:
        return
    key, value = keys_and_values(key_ptr, value_ptr, other, of_page, head, HEADS, HEAD_SIZE, DIMS)
    dim = tl.arange(0, DIMS)
    first = tl.program_id(1).to(tl.int64) * num_tokens * WIDTH
    pair_ptr += head.to(tl.int64) * num_tokens * WIDTH
    every_row = tl.full((TOKENS * PADDED,), True, tl.int1)
    for at in range(begin, end, TOKENS):
        pair, token, group_head, exists = _readers(pair_ptr, at, end, WIDTH, GROUP, PADDED, TOKENS)
        query = rows(query_ptr, token, group_head, every_row, HEADS * GROUP * HEAD_SIZE, head, GROUP, HEAD_SIZE, DIMS)
        logit = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
        logit = tl.where(of_page[None, :] & (other[None, :] <= token[:, None]), logit, NOTHING)
        largest = tl.max(logit, axis=1)
        weight = tl.exp2(logit - largest[:, None])
        total = tl.sum(weight, axis=1)
        weight *= (1.0 / total)[:, None]
        output = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        place = (first + pair) * GROUP + group_head
        tl.store(
            outputs_ptr + place[:, None] * HEAD_SIZE + dim[None, :],
            output.to(outputs_ptr.dtype.element_ty),
            mask=exists[:, None] & (dim < HEAD_SIZE)[None, :],
            cache_modifier=".cs",  # keep the cache for queries
        )
        tl.store(log_sums_ptr + place, largest + tl.log2(total), mask=exists)


@triton.jit(do_not_specialize=["first_head"])
def _page_gradients(
    query_ptr,
    key_ptr,
    value_ptr,
    gradient_ptr,
    log_sum_ptr,
    product_ptr,
    pair_ptr,
    pairs_from_ptr,
    parts_from_ptr,
    page_of_part_ptr,
    page_start_ptr,
    of_queries_ptr,
    of_parts_ptr,
    first_head,
    num_tokens,
    num_pages,
    most_parts,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    READERS: tl.constexpr,
):
    part, head = tl.program_id(0), first_head + tl.program_id(1)
    begin, end, other, of_page = _part_of_page(pairs_from_ptr, parts_from_ptr, page_of_part_ptr, page_start_ptr, part,
                                               head, num_pages, most_parts, READERS, PAGE_SIZE, KEYS)  # fmt: skip
    if begin >= end:
        return
    key, value = keys_and_values(key_ptr, value_ptr, other, of_page, head, HEADS, HEAD_SIZE, DIMS)
    # Few columns of the query gradients are in registers at a time, so that more programs share a multiprocessor.
    slices: tl.constexpr = DIMS // 32 if DIMS > 32 else 1
    key_slices = ()
    for number in tl.static_range(slices):
        column = number * (DIMS // slices) + tl.arange(0, DIMS // slices)
        key_slices = key_slices + (columns(key_ptr, other, of_page, head, column, HEADS, HEAD_SIZE),)  # type: ignore[assignment]  # noqa: RUF005 - Triton's tuples only add
    of_key = tl.zeros((KEYS, DIMS), tl.float32)
    of_value = tl.zeros((KEYS, DIMS), tl.float32)
    dim = tl.arange(0, DIMS)
    first = tl.program_id(1).to(tl.int64) * num_tokens * WIDTH
    pair_ptr += head.to(tl.int64) * num_tokens * WIDTH
    every_row = tl.full((TOKENS * PADDED,), True, tl.int1)
    for at in range(begin, end, TOKENS):
        pair, token, group_head, exists = _readers(pair_ptr, at, end, WIDTH, GROUP, PADDED, TOKENS)
        query = rows(query_ptr, token, group_head, every_row, HEADS * GROUP * HEAD_SIZE, head, GROUP, HEAD_SIZE, DIMS)
        gradient = rows(gradient_ptr, token, group_head, every_row, HEADS * GROUP * HEAD_SIZE, head, GROUP, HEAD_SIZE,
                        DIMS)  # fmt: skip
        of_row = row_places(token, group_head, head, HEADS, GROUP)
        log_sum = tl.load(log_sum_ptr + of_row)
        product = tl.load(product_ptr + of_row)
        logit = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
        seen = (exists[:, None] & of_page[None, :]) & (other[None, :] <= token[:, None])
        weight = tl.where(seen, tl.exp2(logit - log_sum[:, None]), 0.0)
        of_value = tl.dot(tl.trans(weight.to(gradient.dtype)), gradient, of_value, input_precision="ieee")
        of_weight = tl.dot(gradient, tl.trans(value), input_precision="ieee")
        of_logit = (weight * (of_weight - product[:, None])).to(query.dtype)
        of_key = tl.dot(tl.trans(of_logit), query, of_key, input_precision="ieee")
        place = (first + pair) * GROUP + group_head
        for number in tl.static_range(slices):
            column = number * (DIMS // slices) + tl.arange(0, DIMS // slices)
            of_query = tl.dot(of_logit, key_slices[number], input_precision="ieee")
            tl.store(
                of_queries_ptr + place[:, None] * HEAD_SIZE + column[None, :],
                of_query.to(of_queries_ptr.dtype.element_ty),
                mask=exists[:, None] & (column < HEAD_SIZE)[None, :],
                cache_modifier=".cs",
            )
    offset = tl.arange(0, KEYS)
    out = (tl.program_id(1).to(tl.int64) * most_parts + part) * (2 * PAGE_SIZE)
    place = (out + offset)[:, None] * HEAD_SIZE + dim[None, :]
    mask = (offset < PAGE_SIZE)[:, None] & (dim < HEAD_SIZE)[None, :]
    tl.store(of_parts_ptr + place, of_key * scale, mask=mask)
    tl.store(of_parts_ptr + place + PAGE_SIZE * HEAD_SIZE, of_value, mask=mask)


@triton.jit(do_not_specialize=["first_head"])
def _join_parts(
    of_parts_ptr,
    parts_from_ptr,
    page_start_ptr,
    key_gradient_ptr,
    value_gradient_ptr,
    first_head,
    num_pages,
    most_parts,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    page, head, of_values = tl.program_id(0), first_head + tl.program_id(1), tl.program_id(2)
    begin = tl.load(parts_from_ptr + head * (num_pages + 1) + page)
    end = tl.load(parts_from_ptr + head * (num_pages + 1) + page + 1)
    offset, dim = tl.arange(0, PAGE_SIZE), tl.arange(0, DIMS)
    first = (tl.program_id(1).to(tl.int64) * most_parts + begin) * 2 + of_values
    part_ptr = of_parts_ptr + first * (PAGE_SIZE * HEAD_SIZE)
    of_head = (dim < HEAD_SIZE)[None, :]
    total = tl.zeros((PAGE_SIZE, DIMS), tl.float32)
    for _ in range(begin, end):
        total += tl.load(part_ptr + offset[:, None] * HEAD_SIZE + dim[None, :], mask=of_head, other=0.0)
        part_ptr += 2 * PAGE_SIZE * HEAD_SIZE
    token = tl.load(page_start_ptr + page) + offset
    place = (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_SIZE + dim[None, :]
    mask = (token < tl.load(page_start_ptr + page + 1))[:, None] & of_head
    total = total.to(key_gradient_ptr.dtype.element_ty)
    if of_values == 0:
        tl.store(key_gradient_ptr + place, total, mask=mask)
    else:
        tl.store(value_gradient_ptr + place, total, mask=mask)


@triton.jit(do_not_specialize=["first_head"])
def _join_pages(
    of_pages_ptr,
    log_sums_ptr,
    counts_ptr,
    joined_ptr,
    log_sum_ptr,
    first_head,
    num_tokens,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PADDED: tl.constexpr,
    PAGES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token, head = tl.program_id(0), first_head + tl.program_id(1)
    count = tl.load(counts_ptr + head.to(tl.int64) * num_tokens + token)
    group_head, dim = tl.arange(0, PADDED), tl.arange(0, DIMS)
    first = (tl.program_id(1).to(tl.int64) * num_tokens + token) * WIDTH
    of_row = row_places(token, group_head, head, HEADS, GROUP)
    if log_sums_ptr is not None:
        largest = tl.full((PADDED,), NOTHING, tl.float32)
        total = tl.zeros((PADDED,), tl.float32)
        for at in range(0, count, 32):
            slot = at + tl.arange(0, 32)
            exists = (slot < count)[:, None] & (group_head < GROUP)[None, :]
            log_sum = tl.load(log_sums_ptr + (first + slot)[:, None] * GROUP + group_head[None, :], mask=exists,
                              other=NOTHING)  # fmt: skip
            larger = tl.maximum(largest, tl.max(log_sum, axis=0))
            total = total * tl.exp2(largest - larger) + tl.sum(tl.exp2(log_sum - larger[None, :]), axis=0)
            largest = larger
        of_all = largest + tl.log2(total)
        tl.store(log_sum_ptr + of_row, of_all, mask=group_head < GROUP)
    joined = tl.zeros((PAGES, PADDED, DIMS), tl.float32)
    for at in range(0, count, PAGES):
        slot = at + tl.arange(0, PAGES)
        place = (first + slot)[:, None] * GROUP + group_head[None, :]
        exists = (slot < count)[:, None] & (group_head < GROUP)[None, :]
        of_page = tl.load(
            of_pages_ptr + place[:, :, None] * HEAD_SIZE + dim[None, None, :],
            mask=exists[:, :, None] & (dim < HEAD_SIZE)[None, None, :],
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        if log_sums_ptr is not None:
            weight = tl.exp2(tl.load(log_sums_ptr + place, mask=exists, other=NOTHING) - of_all[None, :])
            of_page *= weight[:, :, None]
        joined += of_page
    tl.store(
        joined_ptr + of_row[:, None] * HEAD_SIZE + dim[None, :],
        (tl.sum(joined, axis=0) * scale).to(joined_ptr.dtype.element_ty),
        mask=(group_head < GROUP)[:, None] & (dim < HEAD_SIZE)[None, :],
    )


def _heads_at_once(call: Call, query: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yields the first KV head and the number of heads whose partial results are in memory at a time."""
    of_head = len(query) * list_width(call) * call.group_size * call.head_size * query.itemsize
    at_once = min(max(_JOINED_BYTES // of_head, 1), call.num_kv_heads)
    for first in range(0, call.num_kv_heads, at_once):
        yield first, min(at_once, call.num_kv_heads - first)


def _of_readers(call: Call, launch: _Launch) -> dict[str, int]:
    """Returns the launch settings of a kernel that works on readers of a page."""
    keys, heads = max(call.mask.page_size, 16), call.heads()
    # Larger pages and heads need the registers of more warps.
    times = max(keys * heads["DIMS"] // (16 * 128), 1)
    return heads | {
        "PADDED": call.padded_group, "TOKENS": call.tokens(launch.rows if call.head_size <= 128 else launch.rows // 2),
        "KEYS": keys, "WIDTH": list_width(call), "READERS": PART_READERS, "num_warps": min(launch.num_warps * times, 8),
        "num_stages": launch.num_stages if times == 1 else 1,
    }  # fmt: skip


def _join(
    call: Call,
    of_pages: torch.Tensor,
    log_sums: torch.Tensor | None,
    counts: torch.Tensor,
    joined: torch.Tensor,
    log_sum: torch.Tensor | None,
    heads: tuple[int, int],
    scale: float,
) -> None:
    """Joins partial results of pages: outputs by their log-sums; or, without log-sums, gradients, times a factor."""
    shape = call.heads()
    del shape["PAGE_SIZE"]
    _join_pages[(len(joined), heads[1])](
        of_pages, log_sums, counts, joined, log_sum, heads[0], len(joined), scale, **shape, PADDED=call.padded_group,
        PAGES=call.tokens(_JOINING.rows), WIDTH=list_width(call), num_warps=_JOINING.num_warps,
        num_stages=_JOINING.num_stages,
    )  # fmt: skip


class _ListedAttention(torch.autograd.Function):
    """The kernels as torch differentiates them."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, records: Records, call: Call
    ) -> torch.Tensor:
        lists, counts = list_all(call, query, records)
        readers = invert(call, lists)
        output, num_tokens = torch.empty_like(query), len(query)
        log_sum = query.new_empty(query.shape[:2], dtype=torch.float32)
        for first, heads in _heads_at_once(call, query):
            outputs = query.new_empty((heads, *lists.shape[1:], call.group_size, call.head_size))
            log_sums = query.new_empty(outputs.shape[:-1], dtype=torch.float32)
            most_parts = readers.page_of_part.shape[1]
            _page_outputs[(most_parts, heads)](
                query, key, value, *readers, outputs, log_sums, first, num_tokens, len(readers.page_start) - 1,
                most_parts, call.scale, **_of_readers(call, _OUTPUTS),
            )  # fmt: skip
            _join(call, outputs, log_sums, counts, output, log_sum, (first, heads), 1.0)
        ctx.save_for_backward(query, key, value, counts, output, log_sum, *readers)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, counts, output, log_sum, *kept = ctx.saved_tensors
        call: Call = ctx.call
        readers, shape = Readers(*kept), call.heads()
        gradient = gradients[0].contiguous()
        product = row_products(gradient, output)
        of_query, of_key, of_value = (torch.empty_like(x) for x in (query, key, value))
        num_tokens, num_pages = len(query), len(readers.page_start) - 1
        most_parts = readers.page_of_part.shape[1]
        for first, heads in _heads_at_once(call, query):
            of_queries = query.new_empty((heads, num_tokens, list_width(call), call.group_size, call.head_size))
            of_parts = query.new_empty((heads, most_parts, 2, call.mask.page_size, call.head_size), dtype=torch.float32)
            _page_gradients[(most_parts, heads)](
                query, key, value, gradient, log_sum, product, *readers, of_queries, of_parts, first, num_tokens,
                num_pages, most_parts, call.scale, **_of_readers(call, _GRADIENTS),
            )  # fmt: skip
            _join_parts[(num_pages, heads, 2)](
                of_parts, readers.parts_from, readers.page_start, of_key, of_value, first, num_pages, most_parts,
                HEADS=call.num_kv_heads, PAGE_SIZE=call.mask.page_size, HEAD_SIZE=call.head_size, DIMS=shape["DIMS"],
            )  # fmt: skip
            _join(call, of_queries, None, counts, of_query, None, (first, heads), call.scale)
        return of_query, of_key, of_value, None, None


def listed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, records: Records, call: Call
) -> torch.Tensor:
    """Computes attention under the hard mask. The records get no gradient.

    Args:
        query: `[num_tokens, num_query_heads, head_size]`, contiguous.
        key: `[num_tokens, num_kv_heads, head_size]`, contiguous.
        value: as `key`.
        records: of all complete pages.
        call: the arguments of the call.

    Returns:
        Like `query`.

    Raises:
        ValueError: if the pairs of a token and a page need more than 32 bits.
    """
    num_tokens, width = len(query), list_width(call)
    if max(call.num_kv_heads * (num_tokens + 1), num_tokens * width) >= 1 << 31:
        raise ValueError(
            f"query: got {num_tokens} tokens that read up to {width} pages, allowed for the hard mask: fewer than 2^31 "
            "pages read in all"
        )
    output: torch.Tensor = _ListedAttention.apply(query, key, value, records, call)
    return output
