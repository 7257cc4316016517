"""Selects the exact top k on CPU, compiled, in two rounds of 8-bit radix over bfloat16 scores."""

from __future__ import annotations

import numba
import numpy as np
import torch

from sparse_kernels.compiled import parallel_kernel
from sparse_kernels.threads import use_threads


@numba.njit(nogil=True)
def ordered(bits):
    """Returns an unsigned 16-bit integer that orders like the bfloat16 score; NaN orders like -inf."""
    if bits & 0x7FFF > 0x7F80:
        bits = 0xFF80
    if bits == 0x8000:
        bits = 0
    return bits ^ 0xFFFF if bits & 0x8000 else bits | 0x8000


@numba.njit(nogil=True)
def _bucket(counts, wanted):
    """Returns the bucket that holds the `wanted`-th largest entry, and its rank within that bucket."""
    for bucket in range(255, -1, -1):
        if counts[bucket] >= wanted:
            return bucket, wanted
        wanted -= counts[bucket]
    return 0, wanted


@parallel_kernel()
def _select(scores, num_pages, k, sink_pages, recent_pages, pages):
    num_tokens, num_kv_heads, _ = scores.shape
    for row in numba.prange(num_tokens * num_kv_heads):
        token, head = row // num_kv_heads, row % num_kv_heads
        length = num_pages[token]
        if length <= k:
            for page in range(length):
                pages[token, head, page] = page
            continue
        for page in range(sink_pages):
            pages[token, head, page] = page
        recent = length - recent_pages
        for page in range(recent, length):
            pages[token, head, k - length + page] = page
        taken, wanted = sink_pages, k - sink_pages - recent_pages
        if wanted == 0:
            continue
        keys = np.empty(length, np.uint16)
        high = np.zeros(256, np.int64)
        for page in range(sink_pages, recent):
            key = ordered(scores[token, head, page])
            keys[page] = key
            high[key >> 8] += 1
        top, wanted = _bucket(high, wanted)
        low = np.zeros(256, np.int64)
        for page in range(sink_pages, recent):
            if keys[page] >> 8 == top:
                low[keys[page] & 0xFF] += 1
        bottom, ties = _bucket(low, wanted)
        threshold = top << 8 | bottom
        for page in range(sink_pages, recent):
            if keys[page] > threshold or (keys[page] == threshold and ties > 0):
                if keys[page] == threshold:
                    ties -= 1
                pages[token, head, taken] = page
                taken += 1


def select_pages(
    scores: torch.Tensor, num_pages: torch.Tensor, k: int, sink_pages: int, recent_pages: int
) -> torch.Tensor:
    """See `api.select_pages`."""
    pages = num_pages.new_full((*scores.shape[:2], k), -1)
    use_threads(scores.numel())
    _select(scores.view(torch.uint16).numpy(), num_pages.numpy(), k, sink_pages, recent_pages, pages.numpy())
    return pages
