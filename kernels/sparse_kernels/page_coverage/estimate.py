"""Estimates what pages add to the denominator of a softmax, from the statistics."""

from __future__ import annotations

import math

import torch

from sparse_kernels.batch import Softmax
from sparse_kernels.block_prefill.reference import best_products


def page_logits(query: torch.Tensor, keys: torch.Tensor, page_size: int, softmax: Softmax) -> torch.Tensor:
    """Returns the logarithm of what every page adds to the softmax's denominator, by the best key of its record.

        log m_p = log B + max_j s q . x_pj

    Args:
        query: `[num_kv_heads, group_size, head_size]`.
        keys: x, `[num_kv_heads, num_pages, vectors, head_size]` float32, see `PageStatistics.summaries`.
        page_size: B, tokens of a page.
        softmax: s, and the softcap of the products.

    Returns:
        `[num_kv_heads, group_size, num_pages]` float32.
    """
    logits = best_products(query.float(), keys) * softmax.scale
    if softmax.softcap:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    return logits + math.log(page_size)
