"""Page scores on CUDA: reads the statistics where they lie in the cache, writes bfloat16 scores and nothing else.

For codes, and records of one vector that the query itself meets; Triton scores the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from sparse_kernels.cuda.launch import CODE_FORMATS, FORMATS, int32, int64, kernel
from sparse_kernels.page_statistics import PageStatistics

_SOURCE = Path(__file__).with_name("score.cu")


class Launch(NamedTuple):
    """How the pages of a row are laid out over blocks."""

    chunk: int
    warps: int
    blocks_per_sm: int
    pipelined: bool


def launch_of(statistics: PageStatistics) -> Launch:
    """The launch configuration for a format and head size: what fits the registers of a multiprocessor."""
    if statistics.vectors.shape[3] * statistics.vectors.element_size() > 128:
        return Launch(chunk=1024, warps=8, blocks_per_sm=2, pipelined=statistics.kind.codes is not None)
    return Launch(chunk=1024, warps=8, blocks_per_sm=3, pipelined=False)


def format_of(statistics: PageStatistics) -> int:
    """The format of the vectors by the number that common.cuh gives it."""
    codes = statistics.kind.codes
    return FORMATS[statistics.vectors.dtype] if codes is None else CODE_FORMATS[codes.bits]


def weight_of(statistics: PageStatistics | None, std_weight: float) -> float:
    """The weight of what `statistics_arguments` gives for the spread: zero where records have none."""
    return float(std_weight) if statistics is not None and statistics.kind.has_spread else 0.0


def statistics_arguments(statistics: PageStatistics | None) -> tuple[object, ...]:
    """Pointers to the statistics and their strides in bytes, as the kernels take them."""
    if statistics is None:
        return None, None, None, int64(0), int64(0)
    vectors, scales = statistics.vectors, statistics.scales
    block, head = (vectors.stride(dim) * vectors.element_size() for dim in (0, 1))
    # What a weight of zero multiplies: every word of a record is finite.
    spread = (vectors if scales is None else scales) if statistics.spread is None else statistics.spread
    return vectors, scales, spread, int64(block), int64(head)


def launch_scores(
    query: torch.Tensor,
    statistics: PageStatistics,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    std_weight: float,
    scores: torch.Tensor,
    skipped: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """Scores every complete page of each token's context, but nothing for the groups that are skipped.

    Args:
        query: `[num_tokens, num_query_heads, head_size]`, any strides but a contiguous last dimension.
        statistics: views of the cache's statistics.
        block_table: `[num_requests, max_blocks]` int32.
        lengths: `[num_requests]` int32: complete pages if `page_size` is 0, else tokens of the request's context, of
            which its query tokens are the last.
        page_size: tokens per page, or 0.
        std_weight: lambda.
        scores: `[num_tokens, num_kv_heads, >= pages]` bfloat16 to write to; beyond a row's pages nothing is written.
        skipped: `[num_tokens, num_kv_heads]` uint8, 1 where scores are not needed; none are written there.
        launch: how to launch; by default as `launch_of` says.
    """
    if not statistics.kind.is_fused:
        from sparse_kernels.page_score import triton

        triton.launch_scores(query, statistics, block_table, lengths, page_size, std_weight, scores, skipped)
        return
    num_tokens, num_query_heads, head_size = query.shape
    _, num_kv_heads, pages_per_block, _ = statistics.vectors.shape
    launch = launch or launch_of(statistics)
    macros = {
        "QUERY": FORMATS[query.dtype],
        "MEAN": format_of(statistics),
        "GROUP": num_query_heads // num_kv_heads,
        "HEAD_SIZE": head_size,
        "PAGES_PER_BLOCK": pages_per_block,
        "CHUNK": launch.chunk,
        "WARPS": launch.warps,
        "BLOCKS_PER_SM": launch.blocks_per_sm,
        "PIPELINED": int(launch.pipelined),
    }
    chunks = -(-block_table.shape[1] * pages_per_block // launch.chunk)
    kernel(_SOURCE, query.device, macros, 32 * launch.warps).launch(
        (chunks, num_kv_heads, num_tokens),
        query, int64(query.stride(0)), int64(query.stride(1)),
        *statistics_arguments(statistics),
        block_table, int64(block_table.stride(0)), lengths, int32(num_tokens // len(lengths)), int32(page_size),
        weight_of(statistics, std_weight), skipped, scores, int64(scores.stride(1)),
    )  # fmt: skip


def score_pages(
    query: torch.Tensor,
    statistics: PageStatistics,
    block_table: torch.Tensor,
    num_pages: torch.Tensor,
    std_weight: float,
) -> torch.Tensor:
    """See `api.score_pages`."""
    num_tokens, num_kv_heads = query.shape[:2]
    # The host does not know the lengths: as wide as the block table.
    width = block_table.shape[1] * statistics.pages_per_block
    scores = torch.empty((num_tokens, num_kv_heads, -(-width // 8) * 8), dtype=torch.bfloat16, device=query.device)
    launch_scores(query.flatten(1, 2), statistics, block_table.int(), num_pages.int(), 0, std_weight, scores)
    return scores
