"""Selects the exact top k in torch; this is the specification. CPU and CUDA run implementations of their own."""

from __future__ import annotations

import torch


def order_of(scores: torch.Tensor) -> torch.Tensor:
    """Returns integers that are ordered like bfloat16 scores: NaN like -inf, and -0.0 like 0.0."""
    bits = (scores + 0.0).masked_fill(scores.isnan(), -torch.inf).view(torch.int16).long()
    # Two's complement orders negative floats backwards, so all their bits but the sign are flipped.
    return torch.where(bits < 0, bits ^ 0x7FFF, bits)


def select_pages(
    scores: torch.Tensor, num_pages: torch.Tensor, k: int, sink_pages: int, recent_pages: int
) -> torch.Tensor:
    """See `api.select_pages`."""
    width = scores.shape[-1]
    positions = torch.arange(width, device=scores.device)
    lengths = num_pages[:, None, None]
    # NaN and -inf still beat no page.
    ordered = order_of(scores)
    always = (positions < sink_pages) | (positions >= lengths - recent_pages)
    ordered = torch.where(always, 1 << 16, ordered)
    ordered = torch.where(positions < lengths, ordered, -(1 << 16))
    # The position breaks ties towards the lowest page, and makes every key distinct.
    keys = ordered * (1 << 32) + (width - 1 - positions)
    pages = keys.topk(min(k, width), dim=-1, sorted=False).indices
    pages = torch.where(pages < lengths, pages, width).sort(dim=-1).values
    pages = torch.where(pages < lengths, pages, -1)
    return torch.nn.functional.pad(pages, (0, k - pages.shape[-1]), value=-1)
