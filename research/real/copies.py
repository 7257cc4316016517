"""Simulates the copies of pages that offloading keeps in GPU memory."""

from __future__ import annotations

import numpy as np
import torch
from sparse_kernels.compiled import compiled_kernel
from sparse_kernels.hot_pages.pages import FACTOR


def count_misses(pages: torch.Tensor, sets: int, ways: int) -> torch.Tensor:
    """Return the number of pages without a copy in each step, of caches that start empty.

    A page has its place in the set of `hot_pages.set_of`. A miss replaces the page of the set that is unread longest,
    but none that the step reads: then it gets no copy. The steps of a GPU differ in the order of the pages.

    Args:
        pages: `[caches, steps, k]` int64, pages that each step reads; -1 for none.
        sets: sets of a cache.
        ways: places of a set.

    Returns:
        `[caches, steps]` int64.
    """
    missed = np.zeros(pages.shape[:2], np.int64)
    _count(pages.contiguous().numpy(), sets, ways, FACTOR, missed)
    return torch.from_numpy(missed)


@compiled_kernel()
def _count(pages: np.ndarray, sets: int, ways: int, factor: int, missed: np.ndarray) -> None:
    for cache in range(pages.shape[0]):
        held = np.full((sets, ways), -1, np.int64)
        last = np.full((sets, ways), -1, np.int64)
        place_of = np.full(pages.max() + 1, -1, np.int64)
        for step in range(pages.shape[1]):
            for i in range(pages.shape[2]):
                page = pages[cache, step, i]
                if page < 0:
                    continue
                of_page = ((page * factor) & 0xFFFFFFFF) * sets >> 32
                place = place_of[page]
                if place < 0:
                    missed[cache, step] += 1
                    place = last[of_page].argmin()
                    if last[of_page, place] == step:
                        continue
                    if held[of_page, place] >= 0:
                        place_of[held[of_page, place]] = -1
                    held[of_page, place] = page
                    place_of[page] = place
                last[of_page, place] = step
