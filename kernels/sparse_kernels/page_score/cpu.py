"""Page scores on CPU, compiled: reads the statistics where they lie in the cache. int8 means only."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from sparse_kernels.compiled import FASTMATH, narrow, widen
from sparse_kernels.page_statistics import PageStatistics


@functools.cache
def _kernel(group_size: int, head_size: int) -> Any:
    """Compiled for one model's shape: the compiler unrolls loops whose lengths it knows."""

    @numba.njit(fastmath=FASTMATH, nogil=True, parallel=True, cache=True)
    def score_int8(
        query,
        mean,
        mean_strides,
        scale,
        std,
        scalar_strides,
        pages_per_block,
        block_table,
        num_pages,
        std_weight,
        scores,
    ):
        num_tokens, num_kv_heads = scores.shape[:2]
        for row in numba.prange(num_tokens * num_kv_heads):
            token, head = row // num_kv_heads, row % num_kv_heads
            heads = np.empty((group_size, head_size), np.float32)
            spread = np.empty(group_size, np.float32)
            for g in range(group_size):
                square = np.float32(0)
                for d in range(head_size):
                    heads[g, d] = query[token, head, g, d]
                    square += heads[g, d] * heads[g, d]
                spread[g] = std_weight * np.sqrt(square)
            dots = np.empty((group_size, pages_per_block), np.float32)
            best = np.empty(pages_per_block, np.float32)
            length = num_pages[token]
            for first in range(0, length, pages_per_block):
                block = block_table[token, first // pages_per_block]
                count = min(pages_per_block, length - first)
                # Unsigned, because a negative index would have to be looked for.
                means = np.uint64(block * mean_strides[0] + head * mean_strides[1])
                scalars = np.uint64(block * scalar_strides[0] + head * scalar_strides[1])
                for page in range(count):
                    start = means + np.uint64(page * head_size)
                    for g in range(group_size):
                        dot = np.float32(0)
                        for d in range(head_size):
                            dot += heads[g, d] * np.float32(mean[start + np.uint64(d)])
                        dots[g, page] = dot
                best[:] = -np.inf
                for g in range(group_size):
                    for page in range(count):
                        at = scalars + np.uint64(page)
                        score = dots[g, page] * widen(scale[at]) + spread[g] * widen(std[at])
                        # A NaN, once there, stays.
                        best[page] = best[page] if best[page] > score or best[page] != best[page] else score
                for page in range(count):
                    scores[token, head, first + page] = narrow(best[page])
            for page in range(length, scores.shape[2]):
                scores[token, head, page] = 0xFF80

    return score_int8


def score_pages(
    query: torch.Tensor,
    statistics: PageStatistics,
    block_table: torch.Tensor,
    num_pages: torch.Tensor,
    std_weight: float,
) -> torch.Tensor:
    """See `api.score_pages`."""
    mean, scale, std = statistics.memory
    num_tokens, num_kv_heads = query.shape[:2]
    scores = torch.empty((num_tokens, num_kv_heads, int(num_pages.max())), dtype=torch.bfloat16)
    _kernel(*query.shape[2:])(
        query.float().numpy(),
        mean,
        statistics.mean.stride()[:2],
        scale,
        std,
        statistics.std.stride()[:2],
        statistics.mean.shape[2],
        block_table.numpy(),
        num_pages.numpy(),
        np.float32(std_weight),
        scores.view(torch.uint16).numpy(),
    )
    return scores
