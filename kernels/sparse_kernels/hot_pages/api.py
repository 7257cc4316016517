"""Entry point: prepares the copies for a step."""

from __future__ import annotations

import torch

from sparse_kernels.hot_pages.pages import LAST_STEP, WAYS, HotPool, set_of


def begin_step(pool: HotPool, slots: torch.Tensor) -> None:
    """Counts the step, and forgets the copies of pages whose last token the step writes.

    A page is read once it is complete. Whoever writes it again, for instance after its block was freed, completes it
    again before it is read.

    Args:
        pool: the copies of all layers.
        slots: `[num_tokens]` int64: where the tokens of the step go, a block times its tokens plus the place there;
            negative for no token.
    """
    if slots.is_cuda:
        from sparse_kernels.hot_pages import triton

        triton.begin_step(pool, slots)
        return
    pool.clock.add_(1).bitwise_and_(LAST_STEP)
    page_size = pool.rows.shape[3]
    completes = (slots >= 0) & (slots % page_size == page_size - 1)
    pages = slots[completes] // page_size
    places = set_of(pages, pool.tags.shape[2] // WAYS)[:, None] * WAYS + torch.arange(WAYS, device=slots.device)
    layers, heads, page, way = ((pool.tags[:, :, places] & 0xFFFFFFFF) == pages[:, None] + 1).nonzero(as_tuple=True)
    pool.tags[layers, heads, places[page, way]] = 0
