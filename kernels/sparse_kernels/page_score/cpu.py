"""Scores pages by quarters on a CPU, compiled. It reads the statistics where they lie."""

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
def _kernel(group_size: int, head_size: int, bits: int, rows: int) -> Any:
    """Compiles the kernel for one model's shape: the compiler unrolls loops whose lengths it knows."""
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


def score_pages(
    query: torch.Tensor, statistics: PageStatistics, block_table: torch.Tensor, num_pages: torch.Tensor
) -> torch.Tensor:
    """See `api.score_pages`."""
    scores = torch.empty((*query.shape[:2], int(num_pages.max())), dtype=torch.bfloat16)
    records, steps, _ = statistics.memory
    codes = statistics.kind.codes
    assert statistics.scales is not None
    assert codes is not None
    use_threads(scores.numel() * query.shape[-1])
    _kernel(*query.shape[2:], codes.bits, codes.rows)(
        query.float().numpy(),
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
    return scores
