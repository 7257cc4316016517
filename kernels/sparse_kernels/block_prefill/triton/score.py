"""Scores the past blocks of tiles on a GPU by the summaries of their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import PrefillBatch
from sparse_kernels.block_prefill.rule import BlockRule
from sparse_kernels.block_prefill.tiles import Tiles
from sparse_kernels.block_prefill.triton.summaries import page_summaries
from sparse_kernels.cache import KVCache

_LARGEST_LOGIT = tl.constexpr(60000.0)
"""`_LARGEST_LOGIT` of the reference."""
_PIECE = 16384
"""Summary keys of a context that one program scores for a group of tiles."""
_ROWS_AT_A_TIME = 128
"""Query rows of one product."""
_KEYS_AT_A_TIME = 64
"""Keys of one product."""


# Widths, and places of the tensors of tiles, differ between steps. No step may wait for a compilation.
@triton.jit(
    do_not_specialize=["pages_of_all", "max_blocks"],
    do_not_specialize_on_alignment=["context_start_ptr", "request_ptr", "group_first_ptr", "group_tiles_ptr"],
)
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
    # A tile without tokens is padding behind the last tile of the request.
    if tl.load(count_ptr + last_tile) == 0:
        last_tile = tl.maximum(last_tile - 1, first_tile)
    num_keys = tl.load(end_ptr + last_tile) // PAGE_SIZE * KEYS
    begin = tl.program_id(2) * PIECE
    if (begin >= num_keys) | (tl.load(count_ptr + first_tile) == 0):
        return
    row = part * ROWS + tl.arange(0, ROWS)
    tile = tl.minimum(first_tile + row // PADDED, last_tile)
    count = tl.load(count_ptr + tile)
    # The last token of a tile always scores. Rows that do not exist repeat it; their results are unused.
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


@triton.jit(do_not_specialize=["max_blocks"], do_not_specialize_on_alignment=["slot_ptr"])
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
    # Blocks without a complete page have no logits.
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


def score_past(
    rows: torch.Tensor,
    batch: PrefillBatch,
    tiles: Tiles,
    cache: KVCache,
    rule: BlockRule,
    scale: float,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Scores the past blocks of tiles that do not read their whole past.

    Args:
        rows: see `group_queries`.
        batch: the batch.
        tiles: its tiles.
        cache: with statistics.
        rule: the rule.
        scale: factor of logits.
        dtype: of the scoring products, bfloat16 or float8_e4m3fn.

            Returns:
        `[num_tiles, num_kv_heads, max_blocks]` float32, see `reference.measure_blocks`. Undefined beyond a tile's past
        and for tiles that read their whole past.
    """
    statistics, page_size, scoring = cache.statistics, cache.page_size, tiles.scoring
    assert statistics is not None
    heads, group, head_size = cache.num_kv_heads, rows.shape[1], cache.head_size
    summaries = page_summaries(statistics, batch, tiles, page_size, dtype)
    keys = summaries.keys.shape[2]
    per_block = rule.block_tokens // page_size * keys
    # Rows and two stages of keys fit the shared memory of the smallest multiprocessors.
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
