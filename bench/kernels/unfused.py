"""Page scores in three separate launches: products, scale and spread, largest of the group.

They read the same means (8-bit or bfloat16) from the same paged cache. Intermediate results are float32 in memory. This
is the baseline for fused scoring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sparse_kernels.page_statistics import PageStatistics

_PAGES = 64
"""Pages of a program."""


@triton.jit
def _page_blocks(table_ptr, table_stride, token, pages, num_pages, PAGES_PER_BLOCK: tl.constexpr):
    entries = table_ptr + token * table_stride + pages // PAGES_PER_BLOCK
    return tl.load(entries, mask=pages < num_pages, other=0).to(tl.int64)


@triton.jit
def _products(
    query_ptr,
    mean_ptr,
    table_ptr,
    lengths_ptr,
    products_ptr,
    query_strides,
    mean_strides,
    table_stride,
    products_strides,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
):
    """products[row, g, p] = q_g . stored mean of page p."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // num_kv_heads, row % num_kv_heads
    pages = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    num_pages = tl.load(lengths_ptr + token)
    if tl.program_id(1) * PAGES >= num_pages:
        return
    blocks = _page_blocks(table_ptr, table_stride, token, pages, num_pages, PAGES_PER_BLOCK)
    dims = tl.arange(0, HEAD_SIZE)
    records = blocks * mean_strides[0] + head * mean_strides[1] + pages % PAGES_PER_BLOCK * mean_strides[2]
    exists = pages < num_pages
    mean = tl.load(mean_ptr + records[:, None] + dims[None, :], mask=exists[:, None], other=0.0).to(tl.float32)
    for g in tl.static_range(GROUP):
        query = query_ptr + token * query_strides[0] + head * query_strides[1] + g * query_strides[2] + dims
        dot = tl.sum(mean * tl.load(query).to(tl.float32)[None, :], axis=1)
        tl.store(products_ptr + row * products_strides[0] + g * products_strides[1] + pages, dot, mask=exists)


@triton.jit
def _offsets(
    query_ptr,
    scale_ptr,
    std_ptr,
    table_ptr,
    lengths_ptr,
    products_ptr,
    query_strides,
    scale_strides,
    std_strides,
    table_stride,
    products_strides,
    num_kv_heads,
    std_weight,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
):
    """products[row, g, p] = products[row, g, p] * scale_p + lambda ||q_g|| std_p, in place."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // num_kv_heads, row % num_kv_heads
    pages = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    num_pages = tl.load(lengths_ptr + token)
    if tl.program_id(1) * PAGES >= num_pages:
        return
    blocks = _page_blocks(table_ptr, table_stride, token, pages, num_pages, PAGES_PER_BLOCK)
    within = pages % PAGES_PER_BLOCK
    exists = pages < num_pages
    std = tl.load(
        std_ptr + blocks * std_strides[0] + head * std_strides[1] + within * std_strides[2], mask=exists, other=0.0
    ).to(tl.float32)
    dims = tl.arange(0, HEAD_SIZE)
    for g in tl.static_range(GROUP):
        query = query_ptr + token * query_strides[0] + head * query_strides[1] + g * query_strides[2] + dims
        values = tl.load(query).to(tl.float32)
        norm = tl.sqrt(tl.sum(values * values))
        cells = products_ptr + row * products_strides[0] + g * products_strides[1] + pages
        score = tl.load(cells, mask=exists, other=0.0)
        if scale_ptr is not None:
            scales = blocks * scale_strides[0] + head * scale_strides[1] + within * scale_strides[2]
            score *= tl.load(scale_ptr + scales, mask=exists, other=0.0).to(tl.float32)
        tl.store(cells, score + std_weight * norm * std, mask=exists)


@triton.jit
def _largest_of_group(
    products_ptr,
    lengths_ptr,
    scores_ptr,
    products_strides,
    scores_stride,
    num_kv_heads,
    GROUP: tl.constexpr,
    PAGES: tl.constexpr,
):
    """scores[row, p] = max_g products[row, g, p], rounded once."""
    row = tl.program_id(0).to(tl.int64)
    pages = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    num_pages = tl.load(lengths_ptr + row // num_kv_heads)
    best = tl.full((PAGES,), float("-inf"), tl.float32)
    for g in tl.static_range(GROUP):
        cells = products_ptr + row * products_strides[0] + g * products_strides[1] + pages
        best = tl.maximum(best, tl.load(cells, mask=pages < num_pages, other=float("-inf")))
    tl.store(scores_ptr + row * scores_stride + pages, best.to(tl.bfloat16), mask=pages < scores_stride)


def score_pages(
    query: torch.Tensor,
    statistics: PageStatistics,
    block_table: torch.Tensor,
    num_pages: torch.Tensor,
    std_weight: float,
) -> torch.Tensor:
    """Page scores; arguments and result are those of `sparse_kernels.page_score.score_pages` on a GPU."""
    num_tokens, num_kv_heads, group, head_size = query.shape
    pages_per_block = statistics.pages_per_block
    width = block_table.shape[1] * pages_per_block
    rows = num_tokens * num_kv_heads
    grid = (rows, triton.cdiv(width, _PAGES))
    products = torch.empty((rows, group, width), dtype=torch.float32, device=query.device)
    scores = torch.empty((num_tokens, num_kv_heads, width), dtype=torch.bfloat16, device=query.device)
    # Scales of a record with one vector.
    scale = None if statistics.scales is None else statistics.scales[..., 0]
    vectors, spread = statistics.vectors, statistics.spread
    assert spread is not None
    _products[grid](
        query,
        vectors,
        block_table,
        num_pages,
        products,
        query.stride(),
        vectors.stride(),
        block_table.stride(0),
        products.stride(),
        num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        PAGES_PER_BLOCK=pages_per_block,
        PAGES=_PAGES,
    )
    _offsets[grid](
        query,
        scale,
        spread,
        block_table,
        num_pages,
        products,
        query.stride(),
        spread.stride() if scale is None else scale.stride(),
        spread.stride(),
        block_table.stride(0),
        products.stride(),
        num_kv_heads,
        std_weight,
        GROUP=group,
        HEAD_SIZE=head_size,
        PAGES_PER_BLOCK=pages_per_block,
        PAGES=_PAGES,
    )
    _largest_of_group[grid](
        products, num_pages, scores, products.stride(), width, num_kv_heads, GROUP=group, PAGES=_PAGES
    )
    return scores
