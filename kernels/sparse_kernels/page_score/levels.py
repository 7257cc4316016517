"""Which pages of a row are scored whole, for leveled kinds of statistics.

The first level scores every page. The stripes of a row are its blocks by their number modulo `STRIPES`. Of each stripe
the best share of the pages is refined: scored by the whole record. Nothing else of the batch or the launch decides
this, and a thread block refines its stripes without the others.
"""

from __future__ import annotations

import torch

from sparse_kernels.page_topk.reference import order_of

STRIPES = 32
"""Stripes of a row, a multiple of the largest cluster."""
FLAT_PAGES = 2048
"""Rows of up to this many pages are refined whole."""
LEAST_OF_STRIPE = 32
"""Pages of a stripe that are refined at least. A longer row has at least `STRIPES` times as many refined pages, unless
its blocks are few: as many as a thread block can select."""
SHARE_UNITS = 1 << 10
"""A share is a multiple of 1 / `SHARE_UNITS`, so that every device refines the same number of pages."""


def in_units(refined: float) -> int:
    """Returns a share in units, rounded up.

    Raises:
        ValueError: if the share is not above 0 and at most 1.
    """
    if not 0 < refined <= 1:
        raise ValueError(f"refined: got {refined}, allowed: above 0, at most 1")
    return -int(-refined * SHARE_UNITS // 1)


def refined_pages(first: torch.Tensor, pages_per_block: int, refined: float) -> torch.Tensor:
    """Returns which pages of a row are refined: those that no more than their stripe's share are better than.

    Args:
        first: `[num_kv_heads, num_pages]` bfloat16, scores of the first level.
        pages_per_block: pages of a block.
        refined: the share.

    Returns:
        `[num_kv_heads, num_pages]` bool. Pages with the score of the last refined page are refined too.
    """
    units, num_pages = in_units(refined), first.shape[-1]
    kept = torch.ones_like(first, dtype=torch.bool)
    if num_pages <= FLAT_PAGES:
        return kept
    stripes = torch.arange(num_pages, device=first.device) // pages_per_block % STRIPES
    ordered = order_of(first)
    for stripe in range(STRIPES):
        pages = (stripes == stripe).nonzero().squeeze(1)
        count = max(-(-len(pages) * units // SHARE_UNITS), LEAST_OF_STRIPE)
        if count < len(pages):
            of_stripe = ordered[:, pages]
            least = of_stripe.sort(dim=-1, descending=True).values[:, count - 1, None]
            kept[:, pages] = of_stripe >= least
    return kept
