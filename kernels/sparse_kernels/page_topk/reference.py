"""Exact top-k in torch: the specification, and what runs on CPU."""

from __future__ import annotations

import torch


def select_pages(scores: torch.Tensor, num_pages: torch.Tensor, k: int, sink_pages: int) -> torch.Tensor:
    """See `api.select_pages`."""
    width = scores.shape[-1]
    positions = torch.arange(width, device=scores.device)
    # A page that scores -inf still beats no page; adding 0 makes -0.0 and 0.0 equal.
    lowest = torch.finfo(scores.dtype).min
    scores = (scores + 0.0).nan_to_num(nan=lowest, neginf=lowest, posinf=torch.inf)
    bits = scores.view(torch.int16).long()
    # Two's complement orders negative floats backwards: flip all but the sign.
    ordered = torch.where(bits < 0, bits ^ 0x7FFF, bits)
    ordered = torch.where(positions < sink_pages, 1 << 16, ordered)
    ordered = torch.where(positions < num_pages[:, None, None], ordered, -(1 << 16))
    # The position breaks ties towards the lowest page, and makes every key distinct.
    keys = ordered * (1 << 32) + (width - 1 - positions)
    best = keys.topk(min(k, width), dim=-1, sorted=False).values
    pages = width - 1 - (best & 0xFFFFFFFF)
    pages = torch.where(best >= -(1 << 48), pages, width).sort(dim=-1).values
    pages = torch.where(pages < num_pages[:, None, None], pages, -1)
    return torch.nn.functional.pad(pages, (0, k - pages.shape[-1]), value=-1)
