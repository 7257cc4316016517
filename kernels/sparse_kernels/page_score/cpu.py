"""Page scores on CPU, compiled: reads the statistics where they lie in the cache. int8 vectors, linear kinds only."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from sparse_kernels.compiled import FASTMATH, narrow, widen
from sparse_kernels.page_statistics import PageStatistics


@functools.cache
def _kernel(group_size: int, head_size: int, vectors: int, has_spread: bool) -> Any:
    """Compiled for one model's shape: the compiler unrolls loops whose lengths it knows."""

    @numba.njit(fastmath=FASTMATH, nogil=True, parallel=True, cache=True)
    def score_int8(
        query,
        features,
        records,
        record_strides,
        scales,
        spreads,
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
            heads = np.empty((group_size, vectors, head_size), np.float32)
            norm = np.empty(group_size, np.float32)
            for g in range(group_size):
                square = np.float32(0)
                for d in range(head_size):
                    square += query[token, head, g, d] * query[token, head, g, d]
                # Without spreads what stands in for them is finite.
                norm[g] = std_weight * np.sqrt(square) if has_spread else np.float32(0)
                for v in range(vectors):
                    for d in range(head_size):
                        heads[g, v, d] = features[token, head, g, v * head_size + d]
            dots = np.empty((group_size * vectors, pages_per_block), np.float32)
            best = np.empty(pages_per_block, np.float32)
            length = num_pages[token]
            for first in range(0, length, pages_per_block):
                block = block_table[token, first // pages_per_block]
                count = min(pages_per_block, length - first)
                # Unsigned, because a negative index would have to be looked for.
                first_record = np.uint64(block * record_strides[0] + head * record_strides[1])
                scalars = np.uint64(block * scalar_strides[0] + head * scalar_strides[1])
                for page in range(count):
                    for v in range(vectors):
                        start = first_record + np.uint64((page * vectors + v) * head_size)
                        for g in range(group_size):
                            dot = np.float32(0)
                            for d in range(head_size):
                                dot += heads[g, v, d] * np.float32(records[start + np.uint64(d)])
                            dots[g * vectors + v, page] = dot
                best[:] = -np.inf
                for g in range(group_size):
                    for page in range(count):
                        at = scalars + np.uint64(page)
                        if vectors == 1:
                            # In one expression, which the compiler makes a vector's.
                            score = dots[g, page] * widen(scales[at]) + norm[g] * widen(spreads[at])
                        else:
                            score = norm[g] * widen(spreads[at])
                            for v in range(vectors):
                                scale = widen(scales[scalars + np.uint64(page * vectors + v)])
                                score += dots[g * vectors + v, page] * scale
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
    kind = statistics.kind
    assert statistics.scales is not None
    records, scales, spreads = statistics.memory
    num_tokens, num_kv_heads = query.shape[:2]
    scores = torch.empty((num_tokens, num_kv_heads, int(num_pages.max())), dtype=torch.bfloat16)
    heads = query.float()
    numpy_heads = heads.numpy()
    _kernel(*query.shape[2:], kind.vectors, kind.has_spread)(
        numpy_heads,
        numpy_heads if kind.is_fused else kind.features(heads, std_weight).flatten(-2).numpy(),
        records,
        statistics.vectors.stride()[:2],
        scales,
        spreads,
        statistics.scales.stride()[:2],
        statistics.pages_per_block,
        block_table.numpy(),
        num_pages.numpy(),
        np.float32(std_weight),
        scores.view(torch.uint16).numpy(),
    )
    return scores
