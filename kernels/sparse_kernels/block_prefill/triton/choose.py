"""Chooses the blocks of each tile on a GPU, and lists their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.block_prefill.rule import COUNTERS, SHARE_UNITS, BlockRule, padded_blocks
from sparse_kernels.block_prefill.sequences import PageEntries
from sparse_kernels.block_prefill.tiles import Tiles

_UNITS = float(1 << 40)
"""Units of a mass of 1. Sums of the masses of all rows of a tile stay far below 63 bits."""


# Widths, and places among other requests, differ between steps. Only `BLOCKS` grows with the context.
@triton.jit(
    do_not_specialize=["scores_stride", "table_stride", "pages_stride"],
    do_not_specialize_on_alignment=["request_ptr", "table_ptr"],
)
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
    UNITS: tl.constexpr,
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
        # The order of these integers is that of the scores: blocks always read first, blocks that do not exist last.
        # Tiny logits of both signs are rounded to zero, and -0 is like 0.
        bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000001
        key = tl.where(always, 0x1FFFFFFFF, tl.where(exists, key, 0))
        rows = (count + STRIDE - 1) // STRIDE * GROUP
        if IS_MASS:
            # Masses are added as integers: the order of a sum of floats follows the room, which neighbours decide.
            mass = (tl.where(score == score, score, 0.0) * UNITS).to(tl.int64)
        if IS_ADAPTIVE:
            # Blocks are read until at most this share of the rows' mass is unread.
            needed = tl.sum(mass, axis=0) - (unread_share * rows * UNITS).to(tl.int64)
        low = tl.full((), 0, tl.int64)
        high = tl.full((), 0x200000000, tl.int64)
        # Search for the largest key such that enough blocks have an equal or larger key.
        for _ in range(34):
            middle = (low + high) // 2
            at_least = key >= middle
            enough = tl.sum(at_least.to(tl.int32), axis=0) >= reads
            if IS_ADAPTIVE:
                enough = enough & (tl.sum(tl.where(at_least, mass, 0), axis=0) >= needed)
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        better, equal = key > low, (key == low) & exists
        missing = reads - tl.sum(better.to(tl.int32), axis=0)
        rank = tl.cumsum(equal.to(tl.int32), axis=0) - 1
        taken = rank < missing
        if IS_ADAPTIVE:
            equals = tl.where(equal, mass, 0)
            before = tl.sum(tl.where(better, mass, 0), axis=0) + tl.cumsum(equals, axis=0) - equals
            taken = taken | (before < needed)
        read = better | (equal & taken)
        if IS_MASS and counters_ptr is not None:
            share = 1.0 - tl.sum(tl.where(read, 0, mass), axis=0).to(tl.float32) / UNITS / rows
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


def virtual_sequences(
    scores: torch.Tensor,
    block_table: torch.Tensor,
    tiles: Tiles,
    entries: PageEntries,
    group_size: int,
    rule: BlockRule,
    counters: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses blocks and writes the tokens of each tile and KV head as a separate sequence.

    Args:
        scores: see `score_past`.
        block_table: `[num_requests, max_blocks]` int32.
        tiles: of the requests.
        entries: how pages are numbered.
        group_size: query heads per KV head.
        rule: the rule.
        counters: `[num_kv_heads, COUNTERS]` int64 to add to; None for no counts.

    Returns:
        `[num_tiles * num_kv_heads, max_pages]` int32, pages in order, the tile's own last; and `[num_tiles *
        num_kv_heads]` int32, their tokens. Entries beyond these are undefined.
    """
    heads = scores.shape[1]
    own_blocks = triton.next_power_of_2(-(-rule.tile_tokens // rule.block_tokens) + 1)
    width = (tiles.max_reads + own_blocks) * (rule.block_tokens // entries.tokens)
    pages = torch.empty(len(tiles) * heads, width, dtype=torch.int32, device=scores.device)
    lengths = torch.empty(len(tiles) * heads, dtype=torch.int32, device=scores.device)
    blocks = padded_blocks(tiles.max_past_blocks)
    _choose[(len(tiles), heads)](
        scores,
        tiles.request,
        tiles.num_tokens,
        tiles.past_blocks,
        tiles.reads,
        tiles.end,
        block_table,
        pages,
        lengths,
        counters,
        scores.stride(1),
        block_table.stride(0),
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
        UNITS=_UNITS,
        num_warps=4 if blocks <= 4096 else 16,
    )
    return pages, lengths
