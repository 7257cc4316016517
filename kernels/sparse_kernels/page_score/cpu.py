"""Page scores on CPU, compiled: reads the statistics where they lie in the cache. int8 means only."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from sparse_kernels.page_statistics import PageStatistics

# Reassociation lets the compiler use vector registers; NaN and infinity keep their meaning.
_FASTMATH = {"reassoc", "contract"}


@functools.cache
def _kernel(group_size: int, head_size: int) -> Any:
    """Compiled for one model's shape: the compiler unrolls loops whose lengths it knows."""

    @numba.njit(fastmath=_FASTMATH, nogil=True, parallel=True, cache=True)
    def score_int8(query, mean, scale, std, block_table, num_pages, std_weight, scores):
        num_tokens, num_kv_heads = scores.shape[:2]
        pages_per_block = mean.shape[2]
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
            key = np.empty(head_size, np.float32)
            best = np.empty(1, np.float32)
            bits = best.view(np.uint32)
            scalar_bits = np.empty(2, np.uint32)
            scalars = scalar_bits.view(np.float32)
            for page in range(num_pages[token]):
                block = block_table[token, page // pages_per_block]
                within = page % pages_per_block
                for d in range(head_size):
                    key[d] = mean[block, head, within, d]
                scalar_bits[0] = np.uint32(scale[block, head, within]) << 16
                scalar_bits[1] = np.uint32(std[block, head, within]) << 16
                best[0] = -np.inf
                missing = False
                for g in range(group_size):
                    dot = np.float32(0)
                    for d in range(head_size):
                        dot += heads[g, d] * key[d]
                    score = dot * scalars[0] + spread[g] * scalars[1]
                    missing |= np.isnan(score)
                    best[0] = max(best[0], score)
                # Round to nearest even, as torch does.
                rounded = (bits[0] + 0x7FFF + ((bits[0] >> 16) & 1)) >> 16
                scores[token, head, page] = 0x7FC0 if missing else rounded
            for page in range(num_pages[token], scores.shape[2]):
                scores[token, head, page] = 0xFF80

    return score_int8


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.int16).numpy().view(np.uint16)


def score_pages(
    query: torch.Tensor,
    statistics: PageStatistics,
    block_table: torch.Tensor,
    num_pages: torch.Tensor,
    std_weight: float,
) -> torch.Tensor:
    """See `api.score_pages`."""
    assert statistics.scale is not None
    num_tokens, num_kv_heads = query.shape[:2]
    scores = torch.empty((num_tokens, num_kv_heads, int(num_pages.max())), dtype=torch.bfloat16)
    _kernel(*query.shape[2:])(
        query.float().numpy(),
        statistics.mean.numpy(),
        _bits(statistics.scale),
        _bits(statistics.std),
        block_table.numpy(),
        num_pages.numpy(),
        np.float32(std_weight),
        _bits(scores),
    )
    return scores
