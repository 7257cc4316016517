"""Scores pages on CUDA. It reads the statistics where they lie in the cache, and writes nothing but bfloat16 scores.

It scores codes, and records of one vector that the query itself meets; Triton scores the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from sparse_kernels.batch import DecodeBatch
from sparse_kernels.cuda.head_parts import parts_of, queries_in_parts
from sparse_kernels.cuda.launch import CODE_FORMATS, FORMATS, LEVELED_FORMAT, kernel
from sparse_kernels.cuda.params import ContextParams, QueryParams, StatisticsParams, pointer, struct_of
from sparse_kernels.page_statistics import PageStatistics

_SOURCE = Path(__file__).with_name("score.cu")


class Launch(NamedTuple):
    """How the pages of a row are laid out over blocks."""

    chunk: int
    warps: int
    blocks_per_sm: int
    pipelined: bool


def launch_of(statistics: PageStatistics) -> Launch:
    """Returns the launch configuration for a format and head size: what fits the registers of a multiprocessor."""
    if statistics.vector_bytes > 128:
        return Launch(chunk=1024, warps=8, blocks_per_sm=2, pipelined=statistics.kind.codes is not None)
    return Launch(chunk=1024, warps=8, blocks_per_sm=3, pipelined=False)


def format_of(statistics: PageStatistics) -> int:
    """Returns the format of the vectors by the number that common.cuh gives it."""
    codes = statistics.kind.codes
    if statistics.kind.is_leveled:
        return LEVELED_FORMAT
    return FORMATS[statistics.vectors.dtype] if codes is None else CODE_FORMATS[codes.bits]


def launch_scores(
    batch: DecodeBatch,
    statistics: PageStatistics,
    page_size: int,
    std_weight: float,
    scores: torch.Tensor,
    skipped: torch.Tensor | None = None,
    launch: Launch | None = None,
    refined: float = 1.0,
) -> None:
    """Scores every complete page of each token's context, but nothing for the groups that are skipped.

    Args:
        batch: the requests that decode. Where `page_size` is 0 its lengths are complete pages, not tokens.
        statistics: views of the cache's statistics.
        page_size: tokens per page, or 0.
        std_weight: lambda.
        scores: `[num_tokens, num_kv_heads, >= pages]` bfloat16 to write to; beyond a row's pages nothing is written.
        skipped: `[num_tokens, num_kv_heads]` uint8, 1 where scores are not needed; none are written there.
        launch: how to launch; by default as `launch_of` says.
        refined: see `api.score_pages`.
    """
    if statistics.kind.is_leveled:
        from sparse_kernels.page_score import leveled_triton

        leveled_triton.launch_scores(batch, statistics, page_size, scores, skipped, refined)
        return
    if not statistics.kind.is_fused:
        from sparse_kernels.page_score import triton

        triton.launch_scores(batch, statistics, page_size, std_weight, scores, skipped)
        return
    launch = launch or launch_of(statistics)
    num_kv_heads = statistics.vectors.shape[1]
    parts = parts_of(batch.group_size(num_kv_heads))
    for part, queries in zip(parts, queries_in_parts(batch, num_kv_heads), strict=True):
        of_part = torch.empty_like(scores) if part.start else scores
        _launch(queries, statistics, page_size, std_weight, of_part, skipped, launch)
        if part.start:
            # A page's score is the largest of all heads', or NaN, and rounding does not change an order.
            torch.maximum(scores, of_part, out=scores)


def _launch(
    batch: DecodeBatch,
    statistics: PageStatistics,
    page_size: int,
    std_weight: float,
    scores: torch.Tensor,
    skipped: torch.Tensor | None,
    launch: Launch,
) -> None:
    num_kv_heads, pages_per_block = statistics.vectors.shape[1:3]
    macros = {
        "QUERY": FORMATS[batch.query.dtype],
        "RECORD": format_of(statistics),
        "GROUP": batch.group_size(num_kv_heads),
        "HEAD_SIZE": batch.head_size,
        "PAGES_PER_BLOCK": pages_per_block,
        "CHUNK": launch.chunk,
        "WARPS": launch.warps,
        "BLOCKS_PER_SM": launch.blocks_per_sm,
        "PIPELINED": int(launch.pipelined),
    }
    params = struct_of("ScoreParams")(
        query=QueryParams.of(batch.query),
        statistics=StatisticsParams.of(statistics, std_weight),
        contexts=ContextParams.of(batch),
        skipped=pointer(skipped),
        scores=pointer(scores),
        scores_stride=scores.stride(1),
        page_size=page_size,
    )
    chunks = -(-batch.block_table.shape[1] * pages_per_block // launch.chunk)
    compiled = kernel(_SOURCE, batch.query.device, macros, 32 * launch.warps)
    compiled.launch((chunks, num_kv_heads, batch.num_tokens), params)


def score_pages(
    query: torch.Tensor,
    statistics: PageStatistics,
    block_table: torch.Tensor,
    num_pages: torch.Tensor,
    std_weight: float,
    refined: float = 1.0,
) -> torch.Tensor:
    """See `api.score_pages`."""
    num_tokens, num_kv_heads = query.shape[:2]
    # The scores are as wide as the block table, because the host does not know the lengths.
    width = block_table.shape[1] * statistics.pages_per_block
    scores = torch.empty((num_tokens, num_kv_heads, -(-width // 8) * 8), dtype=torch.bfloat16, device=query.device)
    batch = DecodeBatch(query.flatten(1, 2), block_table.int(), num_pages.int())
    launch_scores(batch, statistics, 0, std_weight, scores, refined=refined)
    return scores
