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
from sparse_kernels.block_prefill.rule import COUNTERS, SHARE_UNITS, BlockRule
from sparse_kernels.block_prefill.sequences import PageEntries, VarlenAttention, VirtualSequences
from sparse_kernels.block_prefill.tiles import Tiles
from sparse_kernels.cache import KVCache
from sparse_kernels.page_statistics import PageStatistics

_LARGEST = tl.constexpr(2.0**90)
"""`_LARGEST` of the reference."""
_LARGEST_LOGIT = tl.constexpr(60000.0)
"""`_LARGEST_LOGIT` of the reference."""
_PIECE = 16384
"""Summary keys of a context that one program scores for a group of tiles."""
_ROWS_AT_A_TIME = 128
"""Query rows that meet the keys at a time."""
_KEYS_AT_A_TIME = 64
"""Keys that they meet at a time."""


@triton.jit
def _summarise(
    vectors_ptr,
    scales_ptr,
    spread_ptr,
    table_ptr,
    seq_lens_ptr,
    context_start_ptr,
    keys_ptr,
    key_scales_ptr,
    deviation_ptr,
    vectors_strides,
    scales_strides,
    spread_strides,
    table_stride,
    pages_of_all,
    SUMMARY_KEYS: tl.constexpr,
    SUMMARY_SPREAD: tl.constexpr,
    VECTORS: tl.constexpr,
    KEYS: tl.constexpr,
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
    spread = None
    if spread_ptr is not None:
        place = spread_ptr + block * spread_strides[0] + head * spread_strides[1] + within * spread_strides[2]
        spread = tl.load(place, mask=exists, other=0.0).to(tl.float32)
    keys = SUMMARY_KEYS(vectors)
    out = head * pages_of_all + tl.load(context_start_ptr + request) // PAGE_SIZE + page
    for k in tl.static_range(KEYS):
        key = tl.clamp(keys[k], -_LARGEST, _LARGEST)
        if key_scales_ptr is not None:
            scale = tl.max(tl.abs(key), axis=1) * (1 / 448)
            key = key / tl.where(scale > 0, scale, 1.0)[:, None]
            tl.store(key_scales_ptr + out * KEYS + k, scale, mask=exists)
        tl.store(
            keys_ptr + (out * KEYS + k)[:, None] * HEAD_SIZE + dim[None, :],
            key.to(keys_ptr.dtype.element_ty),
            mask=real,
        )
    if deviation_ptr is not None:
        deviation = SUMMARY_SPREAD(vectors, spread)
        tl.store(deviation_ptr + out, tl.minimum(deviation, _LARGEST), mask=exists)


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
def _block_logits(
    rows_ptr,
    keys_ptr,
    key_scales_ptr,
    deviation_ptr,
    context_start_ptr,
    request_ptr,
    first_ptr,
    count_ptr,
    past_ptr,
    end_ptr,
    group_first_ptr,
    group_tiles_ptr,
    query_scale_ptr,
    key_scale_ptr,
    logits_ptr,
    pages_of_all,
    max_blocks,
    std_weight,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDED: tl.constexpr,
    OF_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    AT_A_TIME: tl.constexpr,
    PIECE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    # Programs that run side by side read the same keys.
    parts: tl.constexpr = OF_GROUP // ROWS
    group, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    head = tl.program_id(1)
    first_tile, num_tiles = tl.load(group_first_ptr + group), tl.load(group_tiles_ptr + group)
    last_tile = first_tile + num_tiles - 1
    # A tile without tokens pads the request behind its last one.
    if tl.load(count_ptr + last_tile) == 0:
        last_tile = tl.maximum(last_tile - 1, first_tile)
    num_keys = tl.load(end_ptr + last_tile) // PAGE_SIZE * KEYS
    begin = tl.program_id(2) * PIECE
    if (begin >= num_keys) | (tl.load(count_ptr + first_tile) == 0):
        return
    row = part * ROWS + tl.arange(0, ROWS)
    tile = tl.minimum(first_tile + row // PADDED, last_tile)
    count = tl.load(count_ptr + tile)
    # The last token of a tile always scores. Rows that do not exist repeat it, and nobody looks at them.
    token = count - 1 - row % PADDED // GROUP * STRIDE
    token = tl.where(token >= 0, token, count - 1)
    base = (tl.load(first_ptr + tile) * KV_HEADS + head * count + token).to(tl.int64)
    dim = tl.arange(0, DIMS)
    real = (dim < HEAD_SIZE)[None, :]
    place = rows_ptr + (base * GROUP + row % GROUP)[:, None] * HEAD_SIZE + dim[None, :]
    query = tl.load(place, mask=real, other=0.0).to(tl.float32)
    if query_scale_ptr is not None:
        scale *= tl.load(query_scale_ptr)
    if key_scale_ptr is not None:
        scale *= tl.load(key_scale_ptr)
    factor = tl.zeros((ROWS,), tl.float32) + scale
    norm = tl.sqrt_rn(tl.sum(query * query, axis=1)) * std_weight * scale
    if key_scales_ptr is not None:
        largest = tl.max(tl.abs(query), axis=1) * (1 / 448)
        largest = tl.where(largest > 0, largest, 1.0)
        query = query / largest[:, None]
        factor *= largest
    query = query.to(keys_ptr.dtype.element_ty)
    end = tl.load(end_ptr + tile)
    visible = (end - count + token + 1) // PAGE_SIZE * KEYS
    all_see = tl.load(past_ptr + first_tile) * (PAGES_PER_BLOCK * KEYS)
    offset = (
        head.to(tl.int64) * pages_of_all + tl.load(context_start_ptr + tl.load(request_ptr + first_tile)) // PAGE_SIZE
    )
    keys_ptr += offset * KEYS * HEAD_SIZE
    per_block: tl.constexpr = PAGES_PER_BLOCK * KEYS
    blocks: tl.constexpr = AT_A_TIME // per_block
    logits_ptr += (group * KV_HEADS + head).to(tl.int64) * max_blocks * OF_GROUP
    for start in range(begin, tl.minimum(begin + PIECE, num_keys), AT_A_TIME):
        index = start + tl.arange(0, AT_A_TIME)
        exists = index < num_keys
        key = tl.load(
            keys_ptr + index.to(tl.int64)[:, None] * HEAD_SIZE + dim[None, :], mask=exists[:, None] & real, other=0.0
        )
        logit = tl.dot(query, tl.trans(key))
        if key_scales_ptr is not None:
            logit *= tl.load(key_scales_ptr + offset * KEYS + index, mask=exists, other=0.0)[None, :]
        if deviation_ptr is not None:
            spread = tl.load(deviation_ptr + offset + index // KEYS, mask=exists, other=0.0)
            logit = logit * factor[:, None] + norm[:, None] * spread[None, :]
        if start + AT_A_TIME > all_see:
            logit = tl.where(index[None, :] < visible[:, None], logit, float("-inf"))
        best = tl.max(tl.reshape(logit, (ROWS, blocks, per_block)), axis=2)
        if deviation_ptr is None:
            best *= factor[:, None]
        best = tl.where(best == float("-inf"), best, tl.clamp(best, -_LARGEST_LOGIT, _LARGEST_LOGIT))
        block = start // per_block + tl.arange(0, blocks)
        out = logits_ptr + block.to(tl.int64)[None, :] * OF_GROUP + row[:, None]
        tl.store(out, best.to(tl.float16), mask=(block < max_blocks)[None, :])


@triton.jit
def _measure(
    logits_ptr,
    count_ptr,
    past_ptr,
    reads_ptr,
    end_ptr,
    slot_ptr,
    scores_ptr,
    max_blocks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    SCORING: tl.constexpr,
    PADDED: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    AT_A_TIME: tl.constexpr,
    IS_MASS: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    count, past = tl.load(count_ptr + tile), tl.load(past_ptr + tile)
    if (count == 0) | (tl.load(reads_ptr + tile) >= past):
        return
    # Blocks of which no page is complete have no logits.
    num_blocks = (tl.load(end_ptr + tile) // PAGE_SIZE * PAGE_SIZE + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    slot = tl.load(slot_ptr + tile)
    logits_ptr += (slot // TILES * KV_HEADS + head).to(tl.int64) * max_blocks * (TILES * PADDED)
    scores_ptr += (tile * KV_HEADS + head).to(tl.int64) * max_blocks
    row = tl.arange(0, PADDED)
    exists = (row < SCORING) & (count - 1 - row // GROUP * STRIDE >= 0)
    column = slot % TILES * PADDED + row
    within = tl.arange(0, AT_A_TIME)
    if not IS_MASS:
        for start in range(0, past, AT_A_TIME):
            block = start + within
            mask = (block < past)[:, None] & exists[None, :]
            place = logits_ptr + block.to(tl.int64)[:, None] * (TILES * PADDED) + column[None, :]
            logit = tl.load(place, mask=mask, other=float("-inf")).to(tl.float32)
            tl.store(scores_ptr + block, tl.max(logit, axis=1), mask=block < past)
        return
    most = tl.full((PADDED,), -1e30, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    for start in range(0, num_blocks, AT_A_TIME):
        block = start + within
        mask = (block < num_blocks)[:, None] & exists[None, :]
        place = logits_ptr + block.to(tl.int64)[:, None] * (TILES * PADDED) + column[None, :]
        logit = tl.load(place, mask=mask, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, tl.max(logit, axis=0))
        total = total * tl.exp(most - larger) + tl.sum(tl.exp(logit - larger[None, :]), axis=0)
        most = larger
    share = 1.0 / tl.where(total > 0, total, 1.0)
    for start in range(0, past, AT_A_TIME):
        block = start + within
        mask = (block < past)[:, None] & exists[None, :]
        place = logits_ptr + block.to(tl.int64)[:, None] * (TILES * PADDED) + column[None, :]
        logit = tl.load(place, mask=mask, other=float("-inf")).to(tl.float32)
        mass = tl.sum(tl.exp(logit - most[None, :]) * share[None, :], axis=1)
        tl.store(scores_ptr + block, mass, mask=block < past)


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
    IS_MASS: tl.constexpr,
    COUNTERS: tl.constexpr,
    SHARE_UNITS: tl.constexpr,
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
        rows = (count + STRIDE - 1) // STRIDE * GROUP
        if IS_ADAPTIVE:
            # As many blocks are read as leave no more than this share of the rows' mass unread.
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
        if IS_MASS and counters_ptr is not None:
            share = 1.0 - tl.sum(tl.where(read, 0.0, score), axis=0) / rows
            tl.atomic_add(counters_ptr + head * COUNTERS + 2, (tl.maximum(share, 0.0) * SHARE_UNITS + 0.5).to(tl.int64))
            tl.atomic_add(counters_ptr + head * COUNTERS + 3, tl.full((), 1, tl.int64))
    num_read = tl.sum(read.to(tl.int32), axis=0)
    place = tl.cumsum(read.to(tl.int32), axis=0) - 1
    end = tl.load(end_ptr + tile)
    tl.store(lengths_ptr + row, num_read * BLOCK_TOKENS + end - past * BLOCK_TOKENS)
    if counters_ptr is not None:
        tl.atomic_add(counters_ptr + head * COUNTERS, num_read.to(tl.int64))
        tl.atomic_add(counters_ptr + head * COUNTERS + 1, past.to(tl.int64))
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


@dataclass(frozen=True)
class _Summaries:
    """Keys that stand for the pages of a batch, as `Tiles.context_start` orders them; undefined of incomplete pages."""

    keys: torch.Tensor
    """`[num_kv_heads, num_pages, summary_keys, head_size]`, bfloat16 or float8_e4m3fn."""
    scales: torch.Tensor | None
    """`[num_kv_heads, num_pages, summary_keys]` float32, factors of float8 keys."""
    spread: torch.Tensor | None
    """`[num_kv_heads, num_pages]` float32; None for a kind without."""


def page_summaries(
    statistics: PageStatistics, batch: PrefillBatch, tiles: Tiles, page_size: int, dtype: torch.dtype
) -> _Summaries:
    """Takes the keys that stand for every complete page from the records in the cache, in a dtype of `_Summaries`."""
    kind, device = statistics.kind, batch.query.device
    heads, head_size = statistics.vectors.shape[1], statistics.head_size
    shape = heads, tiles.context_tokens // page_size, kind.summary_keys
    keys = torch.empty(*shape, head_size, dtype=dtype, device=device)
    key_scales = torch.empty(shape, dtype=torch.float32, device=device) if dtype.itemsize == 1 else None
    deviation = torch.empty(shape[:2], dtype=torch.float32, device=device) if kind.summary_has_spread else None
    codes, scales, spread = kind.codes, statistics.scales, statistics.spread
    at_a_time = 16
    _summarise[(triton.cdiv(max(batch.max_seq_tokens // page_size, 1), at_a_time), heads, batch.num_requests)](
        statistics.vectors,
        scales,
        spread,
        batch.block_table,
        batch.seq_lens,
        tiles.context_start,
        keys,
        key_scales,
        deviation,
        statistics.vectors.stride(),
        () if scales is None else scales.stride(),
        () if spread is None else spread.stride(),
        batch.block_table.stride(0),
        shape[1],
        SUMMARY_KEYS=kind.triton_summary_keys,
        SUMMARY_SPREAD=kind.triton_summary_spread,
        VECTORS=kind.vectors,
        KEYS=kind.summary_keys,
        BITS=codes.bits if codes else 8,
        DROPPED=codes.dropped if codes else 0,
        PAGE_SIZE=page_size,
        PAGES_PER_BLOCK=statistics.pages_per_block,
        PAGES=at_a_time,
        HEAD_SIZE=head_size,
        DIMS=triton.next_power_of_2(head_size),
        num_warps=4,
    )
    return _Summaries(keys, key_scales, deviation)


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
    cache: KVCache,
    rule: BlockRule,
    scale: float,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Scores the past blocks of the tiles that do not read all of theirs.

    Args:
        rows: see `group_queries`.
        batch: the batch.
        tiles: its tiles.
        cache: with statistics.
        rule: the rule.
        scale: factor of logits.
        dtype: what the scoring products are made of, bfloat16 or float8_e4m3fn.

    Returns:
        `[num_tiles, num_kv_heads, max_blocks]` float32, see `reference.measure_blocks`; undefined beyond a tile's past,
        and for tiles that read all.
    """
    statistics, page_size, scoring = cache.statistics, cache.page_size, tiles.scoring
    assert statistics is not None
    heads, group, head_size = cache.num_kv_heads, rows.shape[1], cache.head_size
    summaries = page_summaries(statistics, batch, tiles, page_size, dtype)
    keys = summaries.keys.shape[2]
    per_block = rule.block_tokens // page_size * keys
    # Rows and two stages of keys share what memory the smallest multiprocessors have.
    is_wide = head_size > 128
    at_a_time = max(_KEYS_AT_A_TIME // (1 + is_wide), per_block)
    piece = max(_PIECE, at_a_time)
    num_groups, device = len(tiles.group_first), rows.device
    scores = torch.empty(len(tiles), heads, tiles.max_blocks, dtype=torch.float32, device=device)
    logits = torch.empty(num_groups, heads, tiles.max_blocks, scoring.of_group, dtype=torch.float16, device=device)
    rows_at_a_time = min(scoring.of_group, _ROWS_AT_A_TIME // (1 + is_wide))
    shape = {
        "KV_HEADS": heads,
        "GROUP": group,
        "STRIDE": rule.query_stride,
        "PADDED": scoring.padded,
        "PAGE_SIZE": page_size,
    }
    most_keys = max(batch.max_seq_tokens // page_size, 1) * keys
    _block_logits[(num_groups * (scoring.of_group // rows_at_a_time), heads, triton.cdiv(most_keys, piece))](
        rows,
        summaries.keys,
        summaries.scales,
        summaries.spread,
        tiles.context_start,
        tiles.request,
        tiles.first_token,
        tiles.num_tokens,
        tiles.past_blocks,
        tiles.end,
        tiles.group_first,
        tiles.group_tiles,
        batch.query_scale,
        cache.key_scale,
        logits,
        summaries.keys.shape[1],
        tiles.max_blocks,
        rule.std_weight,
        scale,
        **shape,
        OF_GROUP=scoring.of_group,
        ROWS=rows_at_a_time,
        KEYS=keys,
        AT_A_TIME=at_a_time,
        PIECE=piece,
        PAGES_PER_BLOCK=rule.block_tokens // page_size,
        HEAD_SIZE=head_size,
        DIMS=triton.next_power_of_2(head_size),
        num_warps=4 if rows_at_a_time <= 64 else 8,
        num_stages=2,
    )
    _measure[(len(tiles), heads)](
        logits,
        tiles.num_tokens,
        tiles.past_blocks,
        tiles.reads,
        tiles.end,
        tiles.slot,
        scores,
        tiles.max_blocks,
        **shape,
        SCORING=scoring.rows,
        TILES=scoring.tiles,
        BLOCK_TOKENS=rule.block_tokens,
        AT_A_TIME=max(8192 // scoring.padded, 8),
        IS_MASS=rule.measure == "mass",
        num_warps=4,
    )
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
        counters: `[num_kv_heads, COUNTERS]` int64 to add to; None for no counts.

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
        batch.block_table,
        pages,
        lengths,
        counters,
        scores.stride(1),
        batch.block_table.stride(0),
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
        IS_MASS=rule.measure == "mass",
        COUNTERS=COUNTERS,
        SHARE_UNITS=SHARE_UNITS,
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
        scores = score_past(rows, batch, tiles, cache, rule, softmax.scale)
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
