"""Entry point of the multi-token-decode operation."""

from __future__ import annotations

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.split_attention import split_attention


def multi_token_decode(
    batch: DecodeBatch, cache: KVCache, softmax: Softmax, output: DecodeOutput | None = None
) -> torch.Tensor:
    """Computes dense attention of the newest tokens of each request. The last token attends to the whole context, each
    earlier token to one token less.

    This verifies drafts. Keys and values are read once for all query tokens of a request and all query heads of a KV
    head. One call takes about as long as a decode step with one token per request, until the rows exceed one step of
    the matrix units. The host reads no length: launches captured in a CUDA graph serve every later batch of their size.
    How a context is split depends on its length and on the number of requests.

    Args:
        batch: the requests. Budgets, scores and dense requests are ignored.
        cache: their keys and values; on a GPU, 16-bit with one contiguous row per token.
        softmax: how logits become weights.
        output: where to write; None for a new tensor of the query's dtype.

    Returns:
        The output's heads, `[num_tokens, num_query_heads, head_size]`; zero for query tokens without a context.
        Arithmetic is in float32, except that a GPU rounds the weights of each piece to the queries' dtype.

    Raises:
        ValueError: if the shapes disagree, or, on a GPU, the cache is packed or has 8-bit elements.
    """
    if not batch.query.is_cuda:
        return split_attention(batch, cache, softmax, output=output)
    from sparse_kernels.multi_token_decode import triton

    batch.check(cache.num_kv_heads, cache.head_size)
    cache.check()
    if cache.key_scale is not None or batch.query_scale is not None:
        raise ValueError("cache: got 8 bits, allowed on a GPU: 16")
    softmax.check(batch.query.shape[1])
    output = DecodeOutput.like(batch.query) if output is None else output
    output.check(batch, cache.num_kv_heads)
    if batch.pages is not None or output.pages is not None:
        raise ValueError("pages: got lists of pages, allowed: None where every page is read")
    triton.multi_token_decode(batch, cache, softmax, output.heads)
    return output.heads
