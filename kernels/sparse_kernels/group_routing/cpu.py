"""Scores groups on a CPU, compiled. Reads token 0's keys in place, from a bfloat16 cache."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from sparse_kernels.compiled import FASTMATH, compiled_kernel, index_array, unpack_page
from sparse_kernels.paging import PagedTensor

_MEAN, _MAX = 0, 1
_LEAST_NORM = np.float32(1e-30)


@functools.cache
def _kernel(group_size: int, head_size: int, page_size: int, length: int, step: int) -> Any:
    """Compiles the kernel for one shape and packing."""

    @compiled_kernel(FASTMATH)
    def score_groups(query, keys, first_blocks, score, scores):
        num_tokens, num_kv_heads = scores.shape
        page = np.empty((page_size, head_size), np.float32)
        for token in range(num_tokens):
            for head in range(num_kv_heads):
                unpack_page(keys, length, step, first_blocks[token], head, 0, page, 0, 0, head_size)
                anchor = page[0]
                key_square = np.float32(0)
                for d in range(head_size):
                    key_square += anchor[d] * anchor[d]
                total, largest, least = np.float32(0), np.float32(-2), np.float32(2)
                for g in range(group_size):
                    dot, square = np.float32(0), np.float32(0)
                    for d in range(head_size):
                        x = query[token, head, g, d]
                        dot += x * anchor[d]
                        square += x * x
                    cosine = dot / max(np.sqrt(square) * np.sqrt(key_square), _LEAST_NORM)
                    total += cosine
                    largest, least = max(largest, cosine), min(least, cosine)
                # Unlike the largest and the smallest, the sum keeps a NaN.
                if score == _MEAN or np.isnan(total):
                    scores[token, head] = total / np.float32(group_size)
                else:
                    scores[token, head] = largest if score == _MAX else least

    return score_groups


def score_groups(query: torch.Tensor, keys: PagedTensor, first_blocks: torch.Tensor, score: int) -> torch.Tensor:
    """See `reference.score_groups`."""
    pages = keys.token_major
    scores = torch.empty(query.shape[:2], dtype=torch.float32)
    kernel = _kernel(*query.shape[2:], keys.page_size, pages.length, pages.step)
    kernel(query.float().numpy(), pages.location, index_array(first_blocks), score, scores.numpy())
    return scores
