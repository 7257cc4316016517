"""Orders queries by tile and KV head on a GPU, and restores the order of outputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import PrefillBatch
from sparse_kernels.block_prefill.tiles import Tiles


@triton.jit
def _group_queries(
    query_ptr,
    rows_ptr,
    first_ptr,
    count_ptr,
    query_strides,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
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
    # Heads of a token may lie apart.
    query_head = head * (WIDTH // HEAD_SIZE) + column // HEAD_SIZE
    place = query_head.to(tl.int64) * query_strides[1] + column % HEAD_SIZE
    for start in range(0, count, TOKENS):
        token = start + tl.arange(0, TOKENS)
        mask = (token < count)[:, None] & (column < WIDTH)[None, :]
        by_token = query_ptr + (first + token).to(tl.int64)[:, None] * query_strides[0] + place[None, :]
        by_row = rows_ptr + (row + token)[:, None] * WIDTH + column[None, :]
        if INTO_ROWS:
            tl.store(by_row, tl.load(by_token, mask=mask), mask=mask)
        else:
            tl.store(by_token, tl.load(by_row, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["lse_stride"])
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
    # Learned sink logits differ by head, but a virtual sequence has one set for all. They are added here.
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
        HEAD_SIZE=rows.shape[2],
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        TOKENS=max(8192 // triton.next_power_of_2(width), 1),
        INTO_ROWS=into_rows,
        num_warps=8,
    )


def ungroup(
    rows: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None, tiles: Tiles, output: torch.Tensor
) -> None:
    """Undoes `group_queries` for the outputs, and adds learned sink logits to the denominators.

    Args:
        rows: `[num_rows, group_size, head_size]`.
        lse: `[group_size, num_rows]` float32, the logarithm of each row's denominator; needed only with sinks.
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
