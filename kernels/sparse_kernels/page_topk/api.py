"""Entry point of the page top-k operation."""

from __future__ import annotations

import torch

from sparse_kernels.batch import PageSelection
from sparse_kernels.page_topk import reference


def select_pages(
    scores: torch.Tensor,
    num_pages: torch.Tensor,
    k: int,
    sink_pages: int = 0,
    recent_pages: int = 0,
) -> torch.Tensor:
    """Selects the `k` best complete pages of each token and KV head, exactly.

    The first `sink_pages` and the last `recent_pages` pages are always among them. Equal scores (and -0.0 and 0.0
    are equal) go to the lowest page. NaN and -inf rank below every other score, by page order.

    Args:
        scores: `[num_tokens, num_kv_heads, max_pages]` bfloat16.
        num_pages: `[num_tokens]` integer; positions of a row from there on do not exist.
        k: pages to select, at least `sink_pages + recent_pages`.
        sink_pages: leading pages that are always selected.
        recent_pages: newest pages that are always selected.

    Returns:
        `[num_tokens, num_kv_heads, k]`, -1 behind the pages of a row that has fewer than `k`: int64 and ascending; on
        CUDA int32 and best first, but ascending for `k` above 1,024 and where all of a row's pages are selected.

    Raises:
        ValueError: if `scores` is not bfloat16, `k` is below `sink_pages + recent_pages` or 1, or `num_pages` does not
            fit the scores (its values are known on the CPU alone).
    """
    if scores.dtype != torch.bfloat16:
        raise ValueError(f"scores: got {scores.dtype}, allowed: torch.bfloat16")
    PageSelection(k, sink_pages, recent_pages).check()
    if num_pages.shape != scores.shape[:1]:
        raise ValueError(f"num_pages: got {list(num_pages.shape)}, allowed: one for each of {len(scores)} tokens")
    if scores.is_cuda:
        from sparse_kernels.page_topk import cuda

        return cuda.select_pages(scores, num_pages, k, sink_pages, recent_pages)[0]
    if len(num_pages) and int(num_pages.max()) > scores.shape[2]:
        raise ValueError(f"num_pages: got {int(num_pages.max())}, allowed: up to the {scores.shape[2]} pages scored")
    implementation = reference.select_pages
    if scores.device.type == "cpu":
        from sparse_kernels.page_topk import cpu

        implementation = cpu.select_pages
    return implementation(scores, num_pages, k, sink_pages, recent_pages)


def best_first(
    pages: torch.Tensor, scores: torch.Tensor, num_pages: torch.Tensor, sink_pages: int = 0, recent_pages: int = 0
) -> torch.Tensor:
    """Orders selected pages as a CUDA selection of some has them: those always selected, then by descending score.

    Args:
        pages: `[num_tokens, num_kv_heads, k]`, what `select_pages` returned for the other arguments.
        scores: `[num_tokens, num_kv_heads, max_pages]` bfloat16.
        num_pages: `[num_tokens]` integer.
        sink_pages: leading pages that are always selected.
        recent_pages: newest pages that are always selected.

    Returns:
        Like `pages`; equal scores by page, -1 last.
    """
    key = scores.float().gather(-1, pages.clamp(min=0).long())
    key = key.masked_fill(key.isnan() | (pages < 0), -torch.inf)
    always = (pages >= 0) & ((pages < sink_pages) | (pages >= (num_pages - recent_pages)[:, None, None]))
    by_score = key.masked_fill(always, torch.inf).argsort(dim=-1, descending=True, stable=True)
    always_first = always.gather(-1, by_score).int().argsort(dim=-1, descending=True, stable=True)
    return pages.gather(-1, by_score.gather(-1, always_first))
