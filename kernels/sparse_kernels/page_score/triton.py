"""Scores pages on a GPU for the kinds of statistics that the CUDA kernels do not score.

A program scores runs of pages for one token and KV head. The grid follows from the number of rows and the width of the
block table, and lengths are read on the device, so a CUDA graph may hold the launch. Block tables are as wide as the
longest context that a server allows. Many rows therefore have few programs each, and no program without a run of pages
costs much.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import DecodeBatch
from sparse_kernels.page_statistics import PageStatistics

PAGES = 64
"""Pages of a run: their vectors fill the registers of a few warps."""
_PROGRAMS = 8192
"""Programs of a launch that scores more runs of pages than this: several times what a GPU runs at once."""


@triton.jit
def num_pages(lengths_ptr, skipped_ptr, row, token, tokens_per_request, page_size):
    """Returns the complete pages of a row's context; 0 for a skipped row."""
    count = tl.load(lengths_ptr + token // tokens_per_request)
    if page_size > 0:
        # Lengths are those of contexts, of which the tokens of a request are the last.
        count = (count - (tokens_per_request - 1 - token % tokens_per_request)) // page_size
    if skipped_ptr is not None:
        count = tl.where(tl.load(skipped_ptr + row) != 0, 0, count)
    return count


@triton.jit
def _page_score(
    query_ptr,
    vectors_ptr,
    scales_ptr,
    spread_ptr,
    table_ptr,
    lengths_ptr,
    skipped_ptr,
    scores_ptr,
    query_strides,
    vectors_strides,
    scales_strides,
    spread_strides,
    table_stride,
    scores_stride,
    std_weight,
    tokens_per_request,
    num_kv_heads,
    page_size,
    FEATURES: tl.constexpr,
    COMBINE: tl.constexpr,
    VECTORS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
):
    row = tl.program_id(0)
    token = row // num_kv_heads
    request = token // tokens_per_request
    count = num_pages(lengths_ptr, skipped_ptr, row, token, tokens_per_request, page_size)
    head = (row % num_kv_heads).to(tl.int64)
    dim = tl.arange(0, DIMS)
    real = dim < HEAD_SIZE
    for first in range(tl.program_id(1) * PAGES, count, tl.num_programs(1) * PAGES):
        page = first + tl.arange(0, PAGES)
        exists = page < count
        block = tl.load(
            table_ptr + request.to(tl.int64) * table_stride + page // PAGES_PER_BLOCK, mask=exists, other=0
        ).to(tl.int64)
        within = page % PAGES_PER_BLOCK
        record = vectors_ptr + block * vectors_strides[0] + head * vectors_strides[1] + within * vectors_strides[2]
        best = tl.full((PAGES,), float("-inf"), tl.float32)
        # The heads of a group read the same vectors; all but the first find them in the nearest cache.
        for g in range(GROUP):
            query_row = query_ptr + token.to(tl.int64) * query_strides[0] + (head * GROUP + g) * query_strides[1]
            query = tl.load(query_row + dim, mask=real, other=0.0).to(tl.float32)
            features = FEATURES(query, std_weight)
            products = ()
            for v in tl.static_range(VECTORS):
                place = record[:, None] + v * HEAD_SIZE + dim[None, :]
                vector = tl.load(place, mask=exists[:, None] & real[None, :], other=0.0).to(tl.float32)
                product = tl.sum(vector * features[v][None, :], axis=1)
                if scales_ptr is not None:
                    scale = (
                        scales_ptr + block * scales_strides[0] + head * scales_strides[1] + within * scales_strides[2]
                    )
                    product *= tl.load(scale + v, mask=exists, other=0.0).to(tl.float32)
                products = products + (product,)  # type: ignore[assignment]  # noqa: RUF005 - Triton's tuples only add
            if COMBINE is not None:
                score = COMBINE(products)
            else:
                score = products[0]  # type: ignore[misc]
                for v in tl.static_range(1, VECTORS):
                    score += products[v]
            if spread_ptr is not None:
                spread = spread_ptr + block * spread_strides[0] + head * spread_strides[1] + within * spread_strides[2]
                norm = std_weight * tl.sqrt_rn(tl.sum(query * query, axis=0))
                score += norm * tl.load(spread, mask=exists, other=0.0).to(tl.float32)
            best = tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL)
        tl.store(scores_ptr + row.to(tl.int64) * scores_stride + page, best.to(tl.bfloat16), mask=exists)


def runs_at_once(batch: DecodeBatch, statistics: PageStatistics, rows: int) -> int:
    """Returns the programs of a row: one for each run of pages that the block table has room for, unless there are many
    rows."""
    runs = triton.cdiv(batch.block_table.shape[1] * statistics.pages_per_block, PAGES)
    return int(min(runs, max(1, _PROGRAMS // rows)))


def launch_scores(
    batch: DecodeBatch,
    statistics: PageStatistics,
    page_size: int,
    std_weight: float,
    scores: torch.Tensor,
    skipped: torch.Tensor | None = None,
) -> None:
    """See `cuda.launch_scores`."""
    kind, num_kv_heads = statistics.kind, statistics.vectors.shape[1]
    scales, spread = statistics.scales, statistics.spread
    rows = batch.num_tokens * num_kv_heads
    _page_score[(rows, runs_at_once(batch, statistics, rows))](
        batch.query,
        statistics.vectors,
        scales,
        spread,
        batch.block_table,
        batch.seq_lens,
        skipped,
        scores,
        batch.query.stride(),
        statistics.vectors.stride(),
        () if scales is None else scales.stride(),
        () if spread is None else spread.stride(),
        batch.block_table.stride(0),
        scores.stride(1),
        float(std_weight),
        batch.tokens_per_request,
        num_kv_heads,
        page_size,
        FEATURES=kind.triton_features,
        COMBINE=kind.triton_combine,
        VECTORS=kind.vectors,
        GROUP=batch.group_size(num_kv_heads),
        HEAD_SIZE=batch.head_size,
        DIMS=triton.next_power_of_2(batch.head_size),
        PAGES_PER_BLOCK=statistics.pages_per_block,
        PAGES=PAGES,
        num_warps=4,
    )
