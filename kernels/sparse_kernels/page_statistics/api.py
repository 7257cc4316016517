"""Entry point of the page-statistics operation."""

from __future__ import annotations

import torch

from sparse_kernels.page_statistics import reference
from sparse_kernels.page_statistics.layout import PageStatistics
from sparse_kernels.paging import PagedTensor


def update_page_statistics(
    keys: PagedTensor, statistics: PageStatistics, blocks: torch.Tensor, pages: torch.Tensor
) -> None:
    """Recomputes the statistics of full pages from the keys in the cache, in place (UNIQUE, Eq. 1-2).

    Idempotent: whatever the block's memory held before, and however often a page is rewritten, the statistics
    follow from the keys alone.

    Args:
        keys: the cached keys.
        statistics: the views to write.
        blocks: `[num_pages]` int64, physical block of each full page; may be empty.
        pages: `[num_pages]` int64, index of the page within its block.

    Raises:
        ValueError: if `blocks` and `pages` differ in shape, or keys and statistics in pages per block.
    """
    if blocks.shape != pages.shape or blocks.dim() != 1:
        raise ValueError(f"blocks and pages: got {tuple(blocks.shape)} and {tuple(pages.shape)}, allowed: equal 1-D")
    if keys.pages_per_block != statistics.mean.shape[2]:
        raise ValueError(
            f"statistics: got {statistics.mean.shape[2]} pages per block, allowed: the keys' {keys.pages_per_block}"
        )
    if not blocks.numel():
        return
    implementation = reference.update_page_statistics
    if blocks.device.type == "cpu" and (keys.view.dtype, statistics.mean.dtype) == (torch.bfloat16, torch.int8):
        from sparse_kernels.page_statistics import cpu

        implementation = cpu.update_page_statistics
    implementation(keys, statistics, blocks, pages)
