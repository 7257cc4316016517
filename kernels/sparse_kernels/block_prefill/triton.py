"""Scores, chooses and regroups on a GPU what FlashAttention then attends to.

Nothing here reads a length on the host: grids follow from bounds that the host knows, and programs beyond a tile's own
numbers leave at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.block_prefill.rule import BlockRule
from sparse_kernels.block_prefill.sequences import PageEntries, VarlenAttention, VirtualSequences
from sparse_kernels.block_prefill.tiles import Tiles
from sparse_kernels.cache import KVCache
from sparse_kernels.page_statistics import PageStatistics

_LARGEST = tl.constexpr(2.0**90)
"""`_LARGEST` of the reference."""
_PIECE_PAGES = 4096
"""Pages of a context that one program scores for one tile."""
_MOST_ROWS = 128
"""Query rows that meet the pages at a time."""
_PAGES = 128
"""Pages that they meet at a time."""


@triton.jit
def _summarise(
    vectors_ptr,
    scales_ptr,
    spread_ptr,
    table_ptr,
    seq_lens_ptr,
    first_page_ptr,
    mean_ptr,
    deviation_ptr,
    vectors_strides,
    scales_strides,
    spread_strides,
    table_stride,
    mean_strides,
    SUMMARY: tl.constexpr,
    VECTORS: tl.constexpr,
    BITS: tl.constexpr,
    DROPPED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    request = tl.program_id(2)
    head = tl.program_id(1).to(tl.int64)
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    num_pages = tl.load(seq_lens_ptr + request) // PAGE_SIZE
    if tl.program_id(0) * PAGES >= num_pages:
        return
    exists = page < num_pages
    block = tl.load(table_ptr + request.to(tl.int64) * table_stride + page // PAGES_PER_BLOCK, mask=exists, other=0).to(
        tl.int64
    )
    within = page % PAGES_PER_BLOCK
    dim = tl.arange(0, DIMS)
    real = exists[:, None] & (dim < HEAD_SIZE)[None, :]
    record = vectors_ptr + block * vectors_strides[0] + head * vectors_strides[1] + within * vectors_strides[2]
    vectors = ()
    for v in tl.static_range(VECTORS):
        # A byte of codes holds dimension d of several vectors, the first in its lowest bits.
        row = v * BITS // 8 if BITS < 8 else v
        x = tl.load(record[:, None] + row * HEAD_SIZE + dim[None, :], mask=real, other=0)
        if BITS < 8:
            code = (x.to(tl.int32) >> (v * BITS % 8)) & ((1 << BITS) - 1)
            x = code.to(tl.float32) - ((1 << BITS) - 1) / 2
            x = tl.where(real & (dim >= DROPPED)[None, :], x, 0.0)
        else:
            x = x.to(tl.float32)
        if scales_ptr is not None:
            scale = scales_ptr + block * scales_strides[0] + head * scales_strides[1] + within * scales_strides[2]
            x *= tl.load(scale + row * scales_strides[3], mask=exists, other=0.0).to(tl.float32)[:, None]
        vectors = vectors + (x,)  # type: ignore[assignment]  # noqa: RUF005 - Triton's tuples only add
    kept = None
    if spread_ptr is not None:
        place = spread_ptr + block * spread_strides[0] + head * spread_strides[1] + within * spread_strides[2]
        kept = tl.load(place, mask=exists, other=0.0).to(tl.float32)
    mean, deviation = SUMMARY(vectors, kept)
    mean = tl.clamp(mean, -_LARGEST, _LARGEST)
    out = tl.load(first_page_ptr + request).to(tl.int64) + page
    place = mean_ptr + head * mean_strides[0] + out[:, None] * HEAD_SIZE + dim[None, :]
    tl.store(place, mean.to(tl.bfloat16), mask=real)
    tl.store(deviation_ptr + head * (mean_strides[0] // HEAD_SIZE) + out, tl.minimum(deviation, _LARGEST), mask=exists)


@triton.jit
def _group_queries(
    query_ptr,
    rows_ptr,
    first_ptr,
    count_ptr,
    query_strides,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    INTO_ROWS: tl.constexpr,
):
    # A row holds the query heads of one KV head of one token.
    tile, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(first_ptr + tile), tl.load(count_ptr + tile)
    column = tl.arange(0, COLUMNS)
    row = (first * KV_HEADS + head * count).to(tl.int64)
    for start in range(0, count, TOKENS):
        token = start + tl.arange(0, TOKENS)
        mask = (token < count)[:, None] & (column < WIDTH)[None, :]
        by_token = query_ptr + (first + token).to(tl.int64)[:, None] * query_strides[0] + head * WIDTH + column[None, :]
        by_row = rows_ptr + (row + token)[:, None] * WIDTH + column[None, :]
        if INTO_ROWS:
            tl.store(by_row, tl.load(by_token, mask=mask), mask=mask)
        else:
            tl.store(by_token, tl.load(by_row, mask=mask), mask=mask)


@triton.jit
def _ungroup_with_sinks(
    output_ptr,
    rows_ptr,
    lse_ptr,
    sinks_ptr,
    first_ptr,
    count_ptr,
    output_strides,
    lse_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    # Learned sink logits differ by head and a virtual sequence has one set for all: they join the denominator here.
    tile, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(first_ptr + tile), tl.load(count_ptr + tile)
    dim = tl.arange(0, DIMS)
    row = (first * KV_HEADS + head * count).to(tl.int64)
    for g in range(GROUP):
        sink = tl.load(sinks_ptr + head * GROUP + g).to(tl.float32)
        for start in range(0, count, TOKENS):
            token = start + tl.arange(0, TOKENS)
            exists = token < count
            mask = exists[:, None] & (dim < HEAD_SIZE)[None, :]
            lse = tl.load(lse_ptr + g * lse_stride + row + token, mask=exists, other=0.0)
            share = 1.0 / (1.0 + tl.exp(sink - lse))
            x = tl.load(rows_ptr + ((row + token)[:, None] * GROUP + g) * HEAD_SIZE + dim[None, :], mask=mask)
            x = (x.to(tl.float32) * share[:, None]).to(x.dtype)
            out = output_ptr + (first + token).to(tl.int64)[:, None] * output_strides[0]
            tl.store(out + (head * GROUP + g) * output_strides[1] + dim[None, :], x, mask=mask)


@triton.jit
def _scoring_rows(
    rows_ptr, base, count, part, GROUP: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """Returns some of the rows that score a tile's past, their norms, their tokens and whether they exist."""
    row = part * ROWS + tl.arange(0, ROWS)
    # The last token of a tile always scores. Rows that do not exist are those of that token once more.
    token = count - 1 - row // GROUP * STRIDE
    exists = token >= 0
    token = tl.where(exists, token, count - 1)
    dim = tl.arange(0, DIMS)
    place = rows_ptr + ((base + token).to(tl.int64) * GROUP + row % GROUP)[:, None] * HEAD_SIZE + dim[None, :]
    query = tl.load(place, mask=(dim < HEAD_SIZE)[None, :], other=0.0)
    full = query.to(tl.float32)
    return query.to(tl.bfloat16), tl.sqrt_rn(tl.sum(full * full, axis=1)), token, exists


@triton.jit
def _pages(mean_ptr, deviation_ptr, page, num_pages, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr):
    """Returns the mean keys `[PAGES, DIMS]` and the spreads `[PAGES]` of some pages."""
    dim = tl.arange(0, DIMS)
    exists = page < num_pages
    place = mean_ptr + page.to(tl.int64)[:, None] * HEAD_SIZE + dim[None, :]
    mean = tl.load(place, mask=exists[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0)
    return mean, tl.load(deviation_ptr + page, mask=exists, other=0.0)


@triton.jit
def _score(
    rows_ptr,
    mean_ptr,
    deviation_ptr,
    first_page_ptr,
    request_ptr,
    first_ptr,
    count_ptr,
    past_ptr,
    reads_ptr,
    scores_ptr,
    mean_stride,
    scores_stride,
    std_weight,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PIECE_PAGES: tl.constexpr,
    PAGES: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    # Tiles that run side by side read the same pages.
    tile, head = tl.program_id(0), tl.program_id(1)
    count, past = tl.load(count_ptr + tile), tl.load(past_ptr + tile)
    num_pages = past * PAGES_PER_BLOCK
    begin = tl.program_id(2) * PIECE_PAGES
    if (begin >= num_pages) | (count == 0) | (tl.load(reads_ptr + tile) >= past):
        return
    base = tl.load(first_ptr + tile) * KV_HEADS + head * count
    offset = head.to(tl.int64) * mean_stride + tl.load(first_page_ptr + tl.load(request_ptr + tile))
    mean_ptr += offset * HEAD_SIZE
    deviation_ptr += offset
    scores_ptr += (tile * KV_HEADS + head).to(tl.int64) * scores_stride
    for part in tl.static_range(PARTS):
        query, norm, _, _ = _scoring_rows(rows_ptr, base, count, part, GROUP, STRIDE, ROWS, HEAD_SIZE, DIMS)
        query, norm = tl.trans(query), norm * std_weight
        for start in range(begin, tl.minimum(begin + PIECE_PAGES, num_pages), PAGES):
            page = start + tl.arange(0, PAGES)
            mean, deviation = _pages(mean_ptr, deviation_ptr, page, num_pages, HEAD_SIZE, DIMS)
            # Pages stand in the rows of the product: most of a maximum over queries then stays within a thread.
            score = tl.dot(mean, query) + deviation[:, None] * norm[None, :]
            best = tl.max(tl.reshape(tl.max(score, axis=1), (PAGES // PAGES_PER_BLOCK, PAGES_PER_BLOCK)), axis=1)
            block = start // PAGES_PER_BLOCK + tl.arange(0, PAGES // PAGES_PER_BLOCK)
            if part > 0:
                best = tl.maximum(best, tl.load(scores_ptr + block, mask=block < past, other=0.0))
            tl.store(scores_ptr + block, best, mask=block < past)
        if part + 1 < PARTS:
            tl.debug_barrier()


@triton.jit
def _choose(
    scores_ptr,
    request_ptr,
    count_ptr,
    past_ptr,
    reads_ptr,
    end_ptr,
    table_ptr,
    pages_ptr,
    lengths_ptr,
    counters_ptr,
    scores_stride,
    table_stride,
    pages_stride,
    block_step,
    head_step,
    sub_step,
    sink_blocks,
    recent_blocks,
    unread_share,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TABLE_TOKENS: tl.constexpr,
    ENTRY_TOKENS: tl.constexpr,
    OWN_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_ADAPTIVE: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    count, past, reads = tl.load(count_ptr + tile), tl.load(past_ptr + tile), tl.load(reads_ptr + tile)
    row = tile * KV_HEADS + head
    if count == 0:
        tl.store(lengths_ptr + row, 0)
        return
    block = tl.arange(0, BLOCKS)
    exists = block < past
    read = exists
    if reads < past:
        score = tl.load(scores_ptr + row.to(tl.int64) * scores_stride + block, mask=exists, other=0.0)
        always = exists & ((block < sink_blocks) | (block >= past - recent_blocks))
        # The order of these integers is that of the scores: first what is always read, last what does not exist.
        bits = score.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000001
        key = tl.where(always, 0x1FFFFFFFF, tl.where(exists, key, 0))
        if IS_ADAPTIVE:
            rows = (count + STRIDE - 1) // STRIDE * GROUP
            needed = tl.sum(score, axis=0) - unread_share * rows
        low = tl.full((), 0, tl.int64)
        high = tl.full((), 0x200000000, tl.int64)
        # The largest key is looked for whose equals and betters are enough.
        for _ in range(34):
            middle = (low + high) // 2
            at_least = key >= middle
            enough = tl.sum(at_least.to(tl.int32), axis=0) >= reads
            if IS_ADAPTIVE:
                enough = enough & (tl.sum(tl.where(at_least, score, 0.0), axis=0) >= needed)
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        better, equal = key > low, (key == low) & exists
        missing = reads - tl.sum(better.to(tl.int32), axis=0)
        rank = tl.cumsum(equal.to(tl.int32), axis=0) - 1
        taken = rank < missing
        if IS_ADAPTIVE:
            mass = tl.sum(tl.where(better, score, 0.0), axis=0)
            before = tl.cumsum(tl.where(equal, score, 0.0), axis=0) - tl.where(equal, score, 0.0)
            taken = taken | (mass + before < needed)
        read = better | (equal & taken)
    num_read = tl.sum(read.to(tl.int32), axis=0)
    place = tl.cumsum(read.to(tl.int32), axis=0) - 1
    end = tl.load(end_ptr + tile)
    tl.store(lengths_ptr + row, num_read * BLOCK_TOKENS + end - past * BLOCK_TOKENS)
    if counters_ptr is not None:
        tl.atomic_add(counters_ptr + head * 2, num_read.to(tl.int64))
        tl.atomic_add(counters_ptr + head * 2 + 1, past.to(tl.int64))
    table_ptr += tl.load(request_ptr + tile).to(tl.int64) * table_stride
    pages_ptr += row.to(tl.int64) * pages_stride
    entries: tl.constexpr = BLOCK_TOKENS // ENTRY_TOKENS
    own = past + tl.arange(0, OWN_BLOCKS)
    for entry in tl.static_range(entries):
        position = block * BLOCK_TOKENS + entry * ENTRY_TOKENS
        physical = tl.load(table_ptr + position // TABLE_TOKENS, mask=read, other=0).to(tl.int64)
        page = physical * block_step + head * head_step + position % TABLE_TOKENS // ENTRY_TOKENS * sub_step
        tl.store(pages_ptr + place * entries + entry, page.to(tl.int32), mask=read)
        position = own * BLOCK_TOKENS + entry * ENTRY_TOKENS
        is_own = position < end
        physical = tl.load(table_ptr + position // TABLE_TOKENS, mask=is_own, other=0).to(tl.int64)
        page = physical * block_step + head * head_step + position % TABLE_TOKENS // ENTRY_TOKENS * sub_step
        tl.store(pages_ptr + (num_read + own - past) * entries + entry, page.to(tl.int32), mask=is_own)


@triton.jit
def _normaliser(
    rows_ptr,
    mean_ptr,
    deviation_ptr,
    first_page_ptr,
    request_ptr,
    first_ptr,
    count_ptr,
    past_ptr,
    reads_ptr,
    end_ptr,
    query_scale_ptr,
    key_scale_ptr,
    lse_ptr,
    mean_stride,
    lse_stride,
    std_weight,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PIECE_PAGES: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    tile, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count, past = tl.load(count_ptr + tile), tl.load(past_ptr + tile)
    end = tl.load(end_ptr + tile)
    num_pages = end // PAGE_SIZE
    begin = piece * PIECE_PAGES
    if (begin >= num_pages) | (count == 0) | (tl.load(reads_ptr + tile) >= past):
        return
    base = tl.load(first_ptr + tile) * KV_HEADS + head * count
    offset = head.to(tl.int64) * mean_stride + tl.load(first_page_ptr + tl.load(request_ptr + tile))
    mean_ptr += offset * HEAD_SIZE
    deviation_ptr += offset
    if query_scale_ptr is not None:
        scale *= tl.load(query_scale_ptr)
    if key_scale_ptr is not None:
        scale *= tl.load(key_scale_ptr)
    lse_ptr += ((tile * KV_HEADS + head).to(tl.int64) * (PARTS * ROWS)) * lse_stride + piece
    for part in tl.static_range(PARTS):
        query, norm, token, is_query = _scoring_rows(rows_ptr, base, count, part, GROUP, STRIDE, ROWS, HEAD_SIZE, DIMS)
        norm = norm * std_weight
        visible = (end - count + token + 1) // PAGE_SIZE
        most = tl.full((ROWS,), -1e30, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for start in range(begin, tl.minimum(begin + PIECE_PAGES, num_pages), PAGES):
            page = start + tl.arange(0, PAGES)
            mean, deviation = _pages(mean_ptr, deviation_ptr, page, num_pages, HEAD_SIZE, DIMS)
            logit = (tl.dot(query, tl.trans(mean)) + norm[:, None] * deviation[None, :]) * scale
            logit = tl.where(page[None, :] < visible[:, None], logit, float("-inf"))
            larger = tl.maximum(most, tl.max(logit, axis=1))
            total = total * tl.exp(most - larger) + tl.sum(tl.exp(logit - larger[:, None]), axis=1)
            most = larger
        row = part * ROWS + tl.arange(0, ROWS)
        lse = tl.where(total > 0, most + tl.log(total), float("-inf"))
        tl.store(lse_ptr + row.to(tl.int64) * lse_stride, lse, mask=is_query)


@triton.jit
def _mass(
    rows_ptr,
    mean_ptr,
    deviation_ptr,
    first_page_ptr,
    request_ptr,
    first_ptr,
    count_ptr,
    past_ptr,
    reads_ptr,
    end_ptr,
    query_scale_ptr,
    key_scale_ptr,
    lse_ptr,
    scores_ptr,
    mean_stride,
    lse_stride,
    scores_stride,
    std_weight,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PIECE_PAGES: tl.constexpr,
    PAGES: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    count, past = tl.load(count_ptr + tile), tl.load(past_ptr + tile)
    num_pages = past * PAGES_PER_BLOCK
    begin = tl.program_id(2) * PIECE_PAGES
    if (begin >= num_pages) | (count == 0) | (tl.load(reads_ptr + tile) >= past):
        return
    base = tl.load(first_ptr + tile) * KV_HEADS + head * count
    offset = head.to(tl.int64) * mean_stride + tl.load(first_page_ptr + tl.load(request_ptr + tile))
    mean_ptr += offset * HEAD_SIZE
    deviation_ptr += offset
    if query_scale_ptr is not None:
        scale *= tl.load(query_scale_ptr)
    if key_scale_ptr is not None:
        scale *= tl.load(key_scale_ptr)
    lse_ptr += ((tile * KV_HEADS + head).to(tl.int64) * (PARTS * ROWS)) * lse_stride
    scores_ptr += (tile * KV_HEADS + head).to(tl.int64) * scores_stride
    pieces = (tl.load(end_ptr + tile) // PAGE_SIZE + PIECE_PAGES - 1) // PIECE_PAGES
    for part in tl.static_range(PARTS):
        query, norm, _, is_query = _scoring_rows(rows_ptr, base, count, part, GROUP, STRIDE, ROWS, HEAD_SIZE, DIMS)
        query, norm = tl.trans(query), norm * std_weight
        row = (part * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        most = tl.full((ROWS,), -1e30, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for piece in range(pieces):
            lse = tl.load(lse_ptr + row * lse_stride + piece, mask=is_query, other=float("-inf"))
            larger = tl.maximum(most, lse)
            total = total * tl.exp(most - larger) + tl.exp(lse - larger)
            most = larger
        normaliser = most + tl.log(tl.where(total > 0, total, 1.0))
        for start in range(begin, tl.minimum(begin + PIECE_PAGES, num_pages), PAGES):
            page = start + tl.arange(0, PAGES)
            mean, deviation = _pages(mean_ptr, deviation_ptr, page, num_pages, HEAD_SIZE, DIMS)
            logit = (tl.dot(mean, query) + deviation[:, None] * norm[None, :]) * scale
            weight = tl.where(is_query[None, :], tl.exp(logit - normaliser[None, :]), 0.0)
            mass = tl.sum(tl.reshape(tl.sum(weight, axis=1), (PAGES // PAGES_PER_BLOCK, PAGES_PER_BLOCK)), axis=1)
            block = start // PAGES_PER_BLOCK + tl.arange(0, PAGES // PAGES_PER_BLOCK)
            if part > 0:
                mass += tl.load(scores_ptr + block, mask=block < past, other=0.0)
            tl.store(scores_ptr + block, mass, mask=block < past)
        if part + 1 < PARTS:
            tl.debug_barrier()


@dataclass(frozen=True)
class _Grid:
    """What the scoring kernels are compiled for."""

    rows: int
    """Rows that meet the pages at a time."""
    parts: int
    """How many times that is done for the rows of a tile."""
    pieces: int
    """Pieces of the longest context, of `_PIECE_PAGES` pages."""

    @classmethod
    def of(cls, group_size: int, rule: BlockRule, max_pages: int) -> _Grid:
        scoring = -(-rule.tile_tokens // rule.query_stride) * group_size
        rows = min(max(triton.next_power_of_2(scoring), 16), _MOST_ROWS)
        return cls(rows, triton.cdiv(scoring, rows), triton.cdiv(max_pages, _PIECE_PAGES))


def page_summaries(
    statistics: PageStatistics, batch: PrefillBatch, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Takes a mean key and a spread of every complete page from the records in the cache.

    Returns:
        `[num_kv_heads, num_pages, head_size]` bfloat16, `[num_kv_heads, num_pages]` float32, and for each request
        `[num_requests]` int32 where its pages begin. Pages beyond a request's complete ones are undefined.
    """
    kind, prompts = statistics.kind, batch.prompts
    heads, head_size = statistics.vectors.shape[1], statistics.head_size
    pages = [length // page_size for length in prompts.longest]
    begins = torch.tensor([sum(pages[:request]) for request in range(len(pages))], dtype=torch.int32)
    device = batch.query.device
    first_page = begins.pin_memory().to(device, non_blocking=True) if batch.query.is_cuda else begins
    mean = torch.empty(heads, max(sum(pages), 1), head_size, dtype=torch.bfloat16, device=device)
    deviation = torch.empty(mean.shape[:2], dtype=torch.float32, device=device)
    codes, scales, spread = kind.codes, statistics.scales, statistics.spread
    at_a_time = 16
    _summarise[(triton.cdiv(max(max(pages), 1), at_a_time), heads, len(prompts))](
        statistics.vectors,
        scales,
        spread,
        prompts.block_table,
        prompts.seq_lens,
        first_page,
        mean,
        deviation,
        statistics.vectors.stride(),
        () if scales is None else scales.stride(),
        () if spread is None else spread.stride(),
        prompts.block_table.stride(0),
        mean.stride(),
        SUMMARY=kind.triton_summary,
        VECTORS=kind.vectors,
        BITS=codes.bits if codes else 8,
        DROPPED=codes.dropped if codes else 0,
        PAGE_SIZE=page_size,
        PAGES_PER_BLOCK=statistics.pages_per_block,
        PAGES=at_a_time,
        HEAD_SIZE=head_size,
        DIMS=triton.next_power_of_2(head_size),
        num_warps=4,
    )
    return mean, deviation, first_page


def group_queries(batch: PrefillBatch, tiles: Tiles, num_kv_heads: int) -> torch.Tensor:
    """Orders the queries by tile, then by KV head: `[num_tokens * num_kv_heads, group_size, head_size]`."""
    num_tokens, num_heads, head_size = batch.query.shape
    rows = batch.query.new_empty(num_tokens * num_kv_heads, num_heads // num_kv_heads, head_size)
    _regroup(batch.query, rows, tiles, num_kv_heads, into_rows=True)
    return rows


def _regroup(by_token: torch.Tensor, rows: torch.Tensor, tiles: Tiles, num_kv_heads: int, into_rows: bool) -> None:
    width = rows.shape[1] * rows.shape[2]
    _group_queries[(len(tiles), num_kv_heads)](
        by_token.view(torch.uint8) if by_token.dtype.itemsize == 1 else by_token,
        rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows,
        tiles.first_token,
        tiles.num_tokens,
        by_token.stride(),
        KV_HEADS=num_kv_heads,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        TOKENS=max(8192 // triton.next_power_of_2(width), 1),
        INTO_ROWS=into_rows,
        num_warps=8,
    )


def ungroup(
    rows: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None, tiles: Tiles, output: torch.Tensor
) -> None:
    """Undoes `group_queries` for the outputs of attention, and lets learned sink logits join the denominators.

    Args:
        rows: `[num_rows, group_size, head_size]`.
        lse: `[group_size, num_rows]` float32, the logarithm of each row's denominator; only with sinks.
        sinks: `[num_query_heads]` learned sink logits, or None.
        tiles: the tiles.
        output: `[num_tokens, num_query_heads, head_size]`, where to write.
    """
    group, head_size = rows.shape[1:]
    heads = output.shape[1] // group
    if sinks is None:
        _regroup(output, rows, tiles, heads, into_rows=False)
        return
    assert lse is not None
    _ungroup_with_sinks[(len(tiles), heads)](
        output,
        rows,
        lse,
        sinks,
        tiles.first_token,
        tiles.num_tokens,
        output.stride(),
        lse.stride(0),
        KV_HEADS=heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        DIMS=triton.next_power_of_2(head_size),
        TOKENS=16,
        num_warps=4,
    )


def score_past(
    rows: torch.Tensor,
    batch: PrefillBatch,
    tiles: Tiles,
    statistics: PageStatistics,
    page_size: int,
    rule: BlockRule,
    scale: float,
    key_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Scores the past blocks of the tiles that do not read all of theirs.

    Args:
        rows: see `group_queries`.
        batch: the batch.
        tiles: its tiles.
        statistics: of the cache.
        page_size: tokens of a page.
        rule: the rule.
        scale: factor of logits; masses alone need it.
        key_scale: one float32: a float8 key times this is the key.

    Returns:
        `[num_tiles, num_kv_heads, max_past_blocks]` float32, the largest scores (see `reference.score_blocks`) or,
        under an adaptive rule, masses (see `reference.block_masses`); undefined beyond a tile's past, and for tiles
        that read all.
    """
    heads, group = statistics.vectors.shape[1], rows.shape[1]
    mean, deviation, first_page = page_summaries(statistics, batch, page_size)
    scores = torch.empty(len(tiles), heads, max(tiles.max_past_blocks, 1), dtype=torch.float32, device=rows.device)
    pages_per_block = rule.block_tokens // page_size
    grid = _Grid.of(group, rule, max(tiles.max_past_blocks, 1) * pages_per_block)
    where = rows, mean, deviation, first_page, tiles.request, tiles.first_token, tiles.num_tokens, tiles.past_blocks
    compiled = {
        "KV_HEADS": heads,
        "GROUP": group,
        "STRIDE": rule.query_stride,
        "ROWS": grid.rows,
        "PARTS": grid.parts,
        "PIECE_PAGES": _PIECE_PAGES,
        "PAGES": _PAGES,
        "HEAD_SIZE": statistics.head_size,
        "DIMS": triton.next_power_of_2(statistics.head_size),
        "num_warps": 4,
        "num_stages": 2,
    }
    if not rule.is_adaptive:
        _score[(len(tiles), heads, grid.pieces)](
            *where, tiles.reads, scores, mean.stride(0) // mean.shape[2], scores.stride(1), float(rule.std_weight),
            PAGES_PER_BLOCK=pages_per_block, **compiled,
        )  # fmt: skip
        return scores
    whole = _Grid.of(group, rule, max(max(batch.prompts.longest) // page_size, 1))
    lse = torch.empty(len(tiles) * heads * grid.parts * grid.rows, whole.pieces, device=rows.device)
    scaling = batch.query_scale, key_scale
    _normaliser[(len(tiles), heads, whole.pieces)](
        *where, tiles.reads, tiles.end, *scaling, lse, mean.stride(0) // mean.shape[2], lse.stride(0),
        rule.std_weight / 2, scale, PAGE_SIZE=page_size, **compiled,
    )  # fmt: skip
    _mass[(len(tiles), heads, grid.pieces)](
        *where, tiles.reads, tiles.end, *scaling, lse, scores, mean.stride(0) // mean.shape[2], lse.stride(0),
        scores.stride(1), rule.std_weight / 2, scale, PAGES_PER_BLOCK=pages_per_block, PAGE_SIZE=page_size, **compiled,
    )  # fmt: skip
    return scores


def virtual_sequences(
    scores: torch.Tensor,
    batch: PrefillBatch,
    tiles: Tiles,
    entries: PageEntries,
    group_size: int,
    rule: BlockRule,
    counters: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses blocks and writes what each tile and KV head reads as a sequence of its own.

    Args:
        scores: see `score_past`.
        batch: the batch.
        tiles: its tiles.
        entries: how pages are numbered.
        group_size: query heads to a KV head.
        rule: the rule.
        counters: `[num_kv_heads, 2]` int64 that past blocks read and past blocks are added to; None for no counts.

    Returns:
        `[num_tiles * num_kv_heads, max_pages]` int32, pages in order, the tile's own last; and `[num_tiles *
        num_kv_heads]` int32, tokens in them. Undefined beyond these.
    """
    heads = scores.shape[1]
    own_blocks = triton.next_power_of_2(-(-rule.tile_tokens // rule.block_tokens) + 1)
    width = (tiles.max_reads + own_blocks) * (rule.block_tokens // entries.tokens)
    pages = torch.empty(len(tiles) * heads, width, dtype=torch.int32, device=scores.device)
    lengths = torch.empty(len(tiles) * heads, dtype=torch.int32, device=scores.device)
    blocks = max(triton.next_power_of_2(tiles.max_past_blocks), 16)
    _choose[(len(tiles), heads)](
        scores,
        tiles.request,
        tiles.num_tokens,
        tiles.past_blocks,
        tiles.reads,
        tiles.end,
        batch.prompts.block_table,
        pages,
        lengths,
        counters,
        scores.stride(1),
        batch.prompts.block_table.stride(0),
        pages.stride(0),
        entries.block_step,
        entries.head_step,
        entries.sub_step,
        rule.sink_blocks,
        rule.recent_blocks,
        1.0 - (rule.coverage or 0.0),
        KV_HEADS=heads,
        GROUP=group_size,
        STRIDE=rule.query_stride,
        BLOCK_TOKENS=rule.block_tokens,
        TABLE_TOKENS=entries.table_tokens,
        ENTRY_TOKENS=entries.tokens,
        OWN_BLOCKS=own_blocks,
        BLOCKS=blocks,
        IS_ADAPTIVE=rule.is_adaptive,
        num_warps=4 if blocks <= 4096 else 16,
    )
    return pages, lengths


def prefill_blocks(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    rule: BlockRule,
    tiles: Tiles,
    attend: VarlenAttention,
    output: torch.Tensor,
    counters: torch.Tensor | None,
) -> None:
    """See `api.prefill_blocks`."""
    heads = cache.num_kv_heads
    rows = group_queries(batch, tiles, heads)
    if tiles.max_reads < tiles.max_past_blocks or rule.is_adaptive:
        assert cache.statistics is not None
        scores = score_past(rows, batch, tiles, cache.statistics, cache.page_size, rule, softmax.scale, cache.key_scale)
    else:
        scores = torch.empty(len(tiles), heads, 1, device=rows.device)
    entries = PageEntries.of(cache.keys, rule.block_tokens)
    pages, lengths = virtual_sequences(scores, batch, tiles, entries, rows.shape[1], rule, counters)
    attended = torch.empty(rows.shape, dtype=output.dtype, device=output.device)
    sequences = VirtualSequences(
        rows, entries.pages_of(cache.keys), entries.pages_of(cache.values), tiles.query_rows(heads), rule.tile_tokens,
        lengths, pages.shape[1] * entries.tokens, pages,
    )  # fmt: skip
    lse = attend(sequences, attended, softmax.sink_logits is not None)
    ungroup(attended, lse, softmax.sink_logits, tiles, output)
