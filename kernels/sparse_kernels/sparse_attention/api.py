"""Entry point of the sparse-attention operation."""

from __future__ import annotations

import torch

from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.sparse_attention import reference


def attend_pages(tokens: QueryTokens, cache: KVCache, pages: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Computes softmax attention over the selected pages and the incomplete last page (UNIQUE, Eq. 5).

    It is exact over these tokens: selecting every complete page gives dense attention. Memory outside the context has
    no influence.

    Args:
        tokens: the query tokens.
        cache: their keys and values.
        pages: `[num_tokens, num_kv_heads, k]` int64, complete pages to attend, -1 for none.
        softmax: how logits become weights.

    Returns:
        `[num_tokens, num_query_heads, head_size]` in the query's dtype; zero where a row reads nothing. All arithmetic
        is in float32.

    Raises:
        ValueError: if the shapes disagree.
    """
    num_tokens, num_kv_heads, group_size, _ = tokens.query.shape
    cache.check()
    tokens.check(cache.num_kv_heads, cache.head_size)
    softmax.check(num_kv_heads * group_size)
    if pages.shape[:2] != (num_tokens, num_kv_heads):
        raise ValueError(f"pages: got {tuple(pages.shape)}, allowed: [{num_tokens}, {num_kv_heads}, k]")
    if num_tokens == 0:
        return tokens.query.new_empty((0, num_kv_heads * group_size, cache.values.head_size))
    implementation = reference.attend_pages
    query, keys, values = tokens.query, cache.keys.view, cache.values.view
    if query.device.type == "cpu" and query.dtype == keys.dtype == values.dtype == torch.bfloat16:
        from sparse_kernels.sparse_attention import cpu

        implementation = cpu.attend_pages
    return implementation(tokens, cache, pages, softmax)
