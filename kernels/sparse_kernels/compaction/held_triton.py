"""Evictions in all layers of one shape on a GPU, in Triton. A program serves a KV head of a layer.

The caches of layers are separate allocations, so kernels take their addresses. One compiled kernel serves all lengths
and all rows of a block table. The order of every sum depends only on the request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import Softmax
from sparse_kernels.compaction.layers import LayerCaches
from sparse_kernels.token_prefill.triton.parts import base_2_logits, tile_of
from sparse_kernels.triton import LOG2E, arithmetic

_MOVED_AT_ONCE = 32
"""Tokens that a program moves at a time."""
_STORED = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
}
_WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32}
"""Integer dtypes by size in bytes. The kernel that moves tokens copies their bits unchanged."""


@triton.jit
def _keys_at(
    keys_ptr, row_strides, table_ptr, token, num_tokens, head, dim,
    HEAD_SIZE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Loads the keys of some tokens, `[tokens, DIMS]`; zeros for tokens that do not exist."""
    exists = token < num_tokens
    block = tl.load(table_ptr + token // BLOCK_TOKENS, mask=exists, other=0).to(tl.int64)
    place = keys_ptr + block * row_strides[0] + head * row_strides[1] + token % BLOCK_TOKENS * row_strides[2]
    mask = exists[:, None] & (dim < HEAD_SIZE)[None, :]
    return tl.load(place[:, None] + dim[None, :], mask=mask, other=0.0).to(DTYPE)


@triton.jit(
    do_not_specialize=["votes_stride", "num_queries", "first_position"],
    do_not_specialize_on_alignment=["query_ptr", "table_ptr"],
)
def _add_votes(
    addresses_ptr, key_scales_ptr, query_ptr, query_scales_ptr, sinks_ptr, table_ptr, votes_ptr, row_strides,
    votes_stride, scale, num_queries, first_position,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, DIMS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SOFTCAP: tl.constexpr, STORED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Adds the attention of the queries of a KV head to its votes."""
    layer = tl.program_id(0).to(tl.int64) // HEADS
    head = tl.program_id(0).to(tl.int64) % HEADS
    keys_ptr = tl.load(addresses_ptr + layer).to(tl.pointer_type(STORED))
    votes_ptr += tl.program_id(0).to(tl.int64) * votes_stride
    query_ptr += layer * num_queries * HEADS * GROUP * HEAD_SIZE
    factor = scale
    if key_scales_ptr is not None:
        factor *= tl.load(key_scales_ptr + layer)
    if query_scales_ptr is not None:
        factor *= tl.load(query_scales_ptr + layer)
    dim = tl.arange(0, DIMS)
    seen = first_position + num_queries
    for first_row in range(0, num_queries * GROUP, ROWS):
        row = first_row + tl.arange(0, ROWS)
        exists = row < num_queries * GROUP
        place = query_ptr + (row // GROUP * HEADS * GROUP + head * GROUP + row % GROUP) * HEAD_SIZE
        mask = exists[:, None] & (dim < HEAD_SIZE)[None, :]
        query = tl.load(place[:, None] + dim[None, :], mask=mask, other=0.0).to(DTYPE)
        # Rows that do not exist see the first token, and their weights are not added.
        position = tl.where(exists, first_position + row // GROUP, 0)
        largest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        if sinks_ptr is not None:
            # A sink logit joins the sum of weights, and gets no vote.
            largest = tl.load(sinks_ptr + (layer * HEADS + head) * GROUP + row % GROUP) * LOG2E
            total += 1.0
        for first in range(0, seen, KEYS):
            token = first + tl.arange(0, KEYS)
            keys = _keys_at(
                keys_ptr, row_strides, table_ptr, token, seen, head, dim, HEAD_SIZE, BLOCK_TOKENS, DTYPE
            )  # fmt: skip
            logits = base_2_logits(query, tl.trans(keys), factor, SOFTCAP)
            logits = tl.where(token[None, :] <= position[:, None], logits, float("-inf"))
            # Every row sees the first token, so no peak is -inf.
            peak = tl.maximum(largest, tl.max(logits, axis=1))
            total = total * tl.exp2(largest - peak) + tl.sum(tl.exp2(logits - peak[:, None]), axis=1)
            largest = peak
        for first in range(0, seen, KEYS):
            token = first + tl.arange(0, KEYS)
            keys = _keys_at(
                keys_ptr, row_strides, table_ptr, token, seen, head, dim, HEAD_SIZE, BLOCK_TOKENS, DTYPE
            )  # fmt: skip
            logits = base_2_logits(query, tl.trans(keys), factor, SOFTCAP)
            counts = (token[None, :] <= position[:, None]) & exists[:, None]
            weights = tl.where(counts, tl.exp2(logits - largest[:, None]) / total[:, None], 0.0)
            before = tl.load(votes_ptr + token, mask=token < seen, other=0.0)
            tl.store(votes_ptr + token, before + tl.sum(weights, axis=0), mask=token < seen)
        # The next rows add to the same votes, perhaps in other threads.
        tl.debug_barrier()


def add_votes(
    votes: torch.Tensor,
    query: torch.Tensor,
    first_position: int,
    block_table: torch.Tensor,
    caches: LayerCaches,
    softmax: Sequence[Softmax],
    query_scales: torch.Tensor | None,
) -> None:
    """See `held.add_votes_of_layers`; `query_scales` is `[num_layers]` float32."""
    sinks = None
    if softmax[0].sink_logits is not None:
        sinks = torch.stack([each.sink_logits.float() for each in softmax if each.sink_logits is not None])
    layers, num_queries, num_heads, head_size = query.shape
    heads = caches.first.num_kv_heads
    rows, columns = tile_of(head_size)
    _add_votes[(layers * heads,)](
        caches.addresses, caches.key_scales, query.contiguous(), query_scales, sinks, block_table, votes,
        caches.first.rows.stride()[:3], votes.stride(1), float(softmax[0].scale), num_queries, first_position,
        HEADS=heads, GROUP=num_heads // heads, HEAD_SIZE=head_size, DIMS=triton.next_power_of_2(head_size),
        BLOCK_TOKENS=caches.block_size, ROWS=rows, KEYS=columns, SOFTCAP=float(softmax[0].softcap),
        STORED=_STORED[caches.first.rows.dtype], DTYPE=arithmetic(query), num_warps=4, num_stages=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=["table_ptr"])
def _move_in_place(
    addresses_ptr, kept_ptr, table_ptr, row_strides, kept, first_token,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TOKENS: tl.constexpr,
    WORD: tl.constexpr,
):  # fmt: skip
    """Moves the kept tokens of a KV head, the last ones first.

    No token moves to the left, and kept tokens are in order. So a target that is also a source has been read: by an
    earlier tile, or by this tile before it writes.
    """
    layer = tl.program_id(0).to(tl.int64) // HEADS
    head = tl.program_id(0).to(tl.int64) % HEADS
    rows_ptr = tl.load(addresses_ptr + layer).to(tl.pointer_type(WORD)) + head * row_strides[1]
    kept_ptr += tl.program_id(0).to(tl.int64) * kept
    element = tl.arange(0, PADDED)
    tiles = (kept + TOKENS - 1) // TOKENS
    for step in range(tiles):
        index = (tiles - 1 - step) * TOKENS + tl.arange(0, TOKENS)
        exists = index < kept
        source = tl.load(kept_ptr + index, mask=exists, other=0)
        target = first_token + index
        old = tl.load(table_ptr + source // BLOCK_TOKENS, mask=exists, other=0).to(tl.int64)
        new = tl.load(table_ptr + target // BLOCK_TOKENS, mask=exists, other=0).to(tl.int64)
        old = old * row_strides[0] + source % BLOCK_TOKENS * row_strides[2]
        new = new * row_strides[0] + target % BLOCK_TOKENS * row_strides[2]
        mask = exists[:, None] & (element < WIDTH)[None, :]
        row = tl.load(rows_ptr + old[:, None] + element[None, :], mask=mask, other=0)
        tl.debug_barrier()
        tl.store(rows_ptr + new[:, None] + element[None, :], row, mask=mask)
        tl.debug_barrier()


def move_in_place(kept: torch.Tensor, block_table: torch.Tensor, first_block: int, caches: LayerCaches) -> None:
    """See `reference.move_tokens`, for caches without statistics; `kept` is `[num_layers, num_kv_heads, num_kept]`."""
    rows = caches.first.rows
    layers, heads, count = kept.shape
    _move_in_place[(layers * heads,)](
        caches.addresses, kept, block_table, rows.stride()[:3], count, first_block * caches.block_size,
        HEADS=heads, WIDTH=rows.shape[3], PADDED=triton.next_power_of_2(rows.shape[3]), BLOCK_TOKENS=caches.block_size,
        TOKENS=_MOVED_AT_ONCE, WORD=_WORDS[rows.itemsize], num_warps=8, num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["query_ptr", "places_ptr"])
def _write_queries(query_ptr, places_ptr, ring_ptr, query_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Copies the query tokens that have a place."""
    place = tl.load(places_ptr + tl.program_id(0)).to(tl.int64)
    if place < 0:
        return
    element = tl.arange(0, PADDED)
    source = query_ptr + tl.program_id(0).to(tl.int64) * query_stride + element
    query = tl.load(source, mask=element < WIDTH, other=0)
    tl.store(ring_ptr + place * WIDTH + element, query, mask=element < WIDTH)


def write_queries(query: torch.Tensor, places: torch.Tensor, ring: torch.Tensor) -> None:
    """See `QueryRing.write`: `[num_tokens, num_heads, head_size]`, `[num_tokens]` int32, and a layer of the ring."""
    width = query.shape[1] * query.shape[2]
    if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
        query = query.contiguous()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[query.itemsize]
    _write_queries[(len(query),)](
        query.view(words), places, ring.view(words), query.stride(0), WIDTH=width, PADDED=triton.next_power_of_2(width)
    )
