"""Entry point of the page-score operation."""

from __future__ import annotations

import torch

from sparse_kernels.page_score import reference
from sparse_kernels.page_score.levels import in_units
from sparse_kernels.page_statistics import PageStatistics


def score_pages(
    query: torch.Tensor,
    statistics: PageStatistics,
    block_table: torch.Tensor,
    num_pages: torch.Tensor,
    std_weight: float,
    refined: float = 1.0,
) -> torch.Tensor:
    """Scores every complete page of each token's context, as its kind of statistics says (UNIQUE: Eq. 3 and 6).

    The score of a page is the largest over the query heads that share its KV head, rounded once to bfloat16. A
    row's bits depend on that row alone: neither on the batch size nor on the neighbours' lengths.

    Args:
        query: `[num_tokens, num_kv_heads, group_size, head_size]`, float16, bfloat16 or float32.
        statistics: views of the cache's statistics.
        block_table: `[num_tokens, max_blocks]` integer, physical block ids of each token's request.
        num_pages: `[num_tokens]` integer, complete pages that token may attend; may be 0.
        std_weight: lambda, the weight of the spread.
        refined: of a leveled kind, the share of a long row's pages that are scored by their whole records (see
            `levels`). The others have the score -inf. Other kinds ignore it.

    Returns:
        `[num_tokens, num_kv_heads, num_pages.max()]` bfloat16, -inf beyond a row's own pages. On CUDA, where the host
        does not know the lengths, as wide as the block table, and beyond a row's own pages undefined.

    Raises:
        ValueError: if the shapes disagree, or the share is not above 0 and at most 1.
    """
    in_units(refined)
    num_tokens, num_kv_heads, _, head_size = query.shape
    if (num_kv_heads, head_size) != (statistics.vectors.shape[1], statistics.head_size):
        raise ValueError(
            f"query: got {num_kv_heads} KV heads of size {head_size}, allowed: the statistics' "
            f"{statistics.vectors.shape[1]} of size {statistics.head_size}"
        )
    if block_table.shape[0] != num_tokens or num_pages.shape != (num_tokens,):
        raise ValueError(
            f"block_table and num_pages: got {block_table.shape[0]} and {tuple(num_pages.shape)} rows, "
            f"allowed: one for each of the {num_tokens} tokens"
        )
    if num_tokens == 0:
        return query.new_empty((0, num_kv_heads, 0), dtype=torch.bfloat16)
    if query.is_cuda:
        from sparse_kernels.page_score import cuda

        return cuda.score_pages(query, statistics, block_table, num_pages, std_weight, refined)
    if query.device.type == "cpu" and statistics.kind.name == "quarters":
        from sparse_kernels.page_score import cpu

        return cpu.score_pages(query, statistics, block_table, num_pages)
    return reference.score_pages(query, statistics, block_table, num_pages, std_weight, refined)
