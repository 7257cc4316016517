"""Converts between a selection and the page lists of a decode step, in torch.

`DecodeBatch.pages` and `DecodeOutput.pages` are such lists. If selection and attention are two calls, as on a CPU,
`chosen_pages` makes the list from a selection, and `attended_pages` makes the input of `attend_pages` from a list.
"""

from __future__ import annotations

import torch


def attended_pages(pages: torch.Tensor, num_pages: torch.Tensor, counts: int | torch.Tensor) -> torch.Tensor:
    """Returns the pages that each row attends to, given its list.

    Args:
        pages: `[num_tokens, num_kv_heads, k]` integer, see `DecodeBatch.pages`.
        num_pages: `[num_tokens]` integer, complete pages of each context.
        counts: pages that a row reads, at most `k`; a tensor that broadcasts to `[num_tokens, num_kv_heads]` if rows
            have budgets.

    Returns:
        `[num_tokens, num_kv_heads, k]` int64, -1 behind the last page. A row with at most `counts` complete pages reads
        all of them. Another row reads the complete pages among the first `counts` places of its list, in their order.
    """
    slot, room = torch.arange(pages.shape[-1], device=pages.device), pages.shape[-1]
    num_pages, counts = num_pages[:, None, None], _by_row(counts, room)
    listed = _without_gaps(pages, (slot < counts) & (pages >= 0) & (pages < num_pages))
    every_page = torch.where(slot < num_pages, slot, -1)
    return torch.where(num_pages <= counts, every_page, listed).long()


def chosen_pages(
    pages: torch.Tensor, num_pages: torch.Tensor, k: int, counts: int | torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the list of a selection in the form of `DecodeOutput.pages`.

    Args:
        pages: `[num_tokens, num_kv_heads, n]` integer, the selected pages in the order in which they are attended, -1
            for none.
        num_pages: `[num_tokens]` integer, complete pages of each context.
        k: length of a list.
        counts: pages that a row reads; a tensor broadcasts to `[num_tokens, num_kv_heads]`; None for `k`.

    Returns:
        `[num_tokens, num_kv_heads, k]` int32, -1 behind the last page. A row with at most `counts` complete pages is
        attended whole and has no page in its list.
    """
    most = _by_row(k if counts is None else counts, k)
    slot = torch.arange(k, device=pages.device)
    listed = _without_gaps(pages, pages >= 0)[..., :k]
    listed = torch.nn.functional.pad(listed, (0, k - listed.shape[-1]), value=-1)
    return torch.where((num_pages[:, None, None] <= most) | (slot >= most), -1, listed).int()


def with_next_pages(
    pages: torch.Tensor, num_pages: torch.Tensor, count: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns lists of pages for steps with longer contexts. The pages that a context completes next are at the end.

    Args:
        pages: `[num_tokens, num_kv_heads, k]` integer, pages of each context.
        num_pages: `[num_tokens]` integer, complete pages of each context.
        count: how many pages follow.
        out: where to write; a new tensor by default.

    Returns:
        `[num_tokens, num_kv_heads, k + count]` in the dtype of `pages`.
    """
    place = torch.arange(count, dtype=pages.dtype, device=pages.device)
    following = num_pages.to(pages.dtype)[:, None, None] + place
    return torch.cat([pages, following.expand(*pages.shape[:2], count)], dim=2, out=out)


def _by_row(counts: int | torch.Tensor, room: int) -> int | torch.Tensor:
    """Returns counts that broadcast to `[num_tokens, num_kv_heads, places]`, at most as many as there are places."""
    if isinstance(counts, int):
        return min(counts, room)
    return counts.clamp(max=room)[..., None]


def _without_gaps(pages: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    """Moves the pages that exist to the front, in their order, and puts -1 behind them."""
    front = (~exists).int().argsort(dim=-1, stable=True)
    return torch.where(exists, pages, -1).gather(-1, front)
