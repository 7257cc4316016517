"""Scores pages on CPU, compiled, for the default formats: int8 vectors of linear kinds, and quarters. It reads the
statistics where they lie."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from sparse_kernels.compiled import FASTMATH, index_array, narrow, parallel_kernel, unpack_codes, widen
from sparse_kernels.page_statistics import PageStatistics
from sparse_kernels.threads import use_threads


@functools.cache
def _kernel(group_size: int, head_size: int, vectors: int, has_spread: bool) -> Any:
    """Compiles the kernel for one model's shape: the compiler unrolls loops whose lengths it knows."""

    @parallel_kernel(FASTMATH)
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
                # Where there are no spreads, finite numbers stand in for them.
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
                # Indices are unsigned, because a test for negative ones would cost time.
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
                            # The compiler vectorises this as one expression.
                            score = dots[g, page] * widen(scales[at]) + norm[g] * widen(spreads[at])
                        else:
                            score = norm[g] * widen(spreads[at])
                            for v in range(vectors):
                                scale = widen(scales[scalars + np.uint64(page * vectors + v)])
                                score += dots[g * vectors + v, page] * scale
                        # A NaN stays once it is there.
                        best[page] = best[page] if best[page] > score or best[page] != best[page] else score
                for page in range(count):
                    scores[token, head, first + page] = narrow(best[page])
            for page in range(length, scores.shape[2]):
                scores[token, head, page] = 0xFF80

    return score_int8


@functools.cache
def _codes_kernel(group_size: int, head_size: int, bits: int, rows: int) -> Any:
    """Compiles the kernel for one model's shape, like `_kernel`."""
    per_byte, mask = 8 // bits, (1 << bits) - 1

    @parallel_kernel(FASTMATH)
    def score_codes(
        queries, dropped, records, strides, steps, step_strides, pages_per_block, block_table, num_pages, scores
    ):
        num_tokens, num_kv_heads = scores.shape[:2]
        for row in numba.prange(num_tokens * num_kv_heads):
            token, head = row // num_kv_heads, row % num_kv_heads
            # A thread has its own copies: the compiler then knows that nothing else writes to them.
            heads = np.zeros((group_size, head_size), np.float32)
            middle = np.zeros(group_size, np.float32)
            for g in range(group_size):
                for d in range(dropped, head_size):
                    heads[g, d] = queries[token, head, g, d]
                    middle[g] += np.float32(mask / 2) * heads[g, d]
            codes = np.empty((per_byte, head_size), np.float32)
            length = num_pages[token]
            for page in range(length):
                block, within = block_table[token, page // pages_per_block], page % pages_per_block
                # Indices are unsigned, because a test for negative ones would cost time.
                record = np.uint64(block * strides[0] + head * strides[1] + within * strides[2])
                scalars = np.uint64(block * step_strides[0] + head * step_strides[1] + within * step_strides[2])
                best = np.float32(-np.inf)
                for shared in range(rows):
                    start = record + np.uint64(shared * head_size)
                    unpack_codes(records, start, codes, bits)
                    largest = np.float32(-np.inf)
                    for g in range(group_size):
                        for j in range(per_byte):
                            dot = np.float32(0)
                            for d in range(head_size):
                                dot += heads[g, d] * codes[j, d]
                            dot -= middle[g]
                            # A NaN stays once it is there.
                            largest = largest if largest > dot or largest != largest else dot
                    largest *= widen(steps[scalars + np.uint64(shared * step_strides[3])])
                    best = best if best > largest or best != best else largest
                scores[token, head, page] = narrow(best)
            for page in range(length, scores.shape[2]):
                scores[token, head, page] = 0xFF80

    return score_codes


def _score_codes(
    query: torch.Tensor,
    statistics: PageStatistics,
    block_table: torch.Tensor,
    num_pages: torch.Tensor,
    scores: torch.Tensor,
) -> None:
    records, steps, _ = statistics.memory
    codes = statistics.kind.codes
    assert statistics.scales is not None
    assert codes is not None
    use_threads(scores.numel() * query.shape[-1])
    _codes_kernel(*query.shape[2:], codes.bits, codes.rows)(
        statistics.kind.features(query.float(), 0.0)[..., 0, :].numpy(),
        codes.dropped,
        records,
        statistics.vectors.stride(),
        steps,
        statistics.scales.stride(),
        statistics.pages_per_block,
        index_array(block_table),
        index_array(num_pages),
        scores.view(torch.uint16).numpy(),
    )


def score_pages(
    query: torch.Tensor,
    statistics: PageStatistics,
    block_table: torch.Tensor,
    num_pages: torch.Tensor,
    std_weight: float,
) -> torch.Tensor:
    """See `api.score_pages`."""
    num_tokens, num_kv_heads = query.shape[:2]
    scores = torch.empty((num_tokens, num_kv_heads, int(num_pages.max())), dtype=torch.bfloat16)
    if statistics.kind.codes:
        _score_codes(query, statistics, block_table, num_pages, scores)
        return scores
    kind = statistics.kind
    assert statistics.scales is not None
    records, scales, spreads = statistics.memory
    heads = query.float()
    numpy_heads = heads.numpy()
    use_threads(scores.numel() * kind.vectors * query.shape[-1])
    _kernel(*query.shape[2:], kind.vectors, kind.has_spread)(
        numpy_heads,
        numpy_heads if kind.is_fused else kind.features(heads, std_weight).flatten(-2).numpy(),
        records,
        statistics.vectors.stride()[:2],
        scales,
        spreads,
        statistics.scales.stride()[:2],
        statistics.pages_per_block,
        index_array(block_table),
        index_array(num_pages),
        np.float32(std_weight),
        scores.view(torch.uint16).numpy(),
    )
    return scores
