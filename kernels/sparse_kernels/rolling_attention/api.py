"""Entry point of attention with rolling positions."""

from __future__ import annotations

import torch

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.rolling_attention import reference
from sparse_kernels.rolling_attention.rule import RollingWindow, Rotation


def attend_rolling(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    window: RollingWindow,
    rotation: Rotation,
    output: torch.Tensor,
) -> torch.Tensor:
    """Computes attention to the first tokens and the newest ones, as if the first lay directly before the window.

    StreamingLLM (arXiv 2309.17453) counts positions within the cache: it turns the keys of S, the first `sink_tokens`
    tokens, anew in each step. Logits depend on the distance of two positions alone, so turning the query back has the
    same effect, and the cache stays as it is. With the query q at position p, turned by R_p, the keys k_j, turned by
    R_j, and delta = p - (cache_tokens - 1):

        logit_j = scale (R_delta^T q) . k_j  for j in S;    scale q . k_j  for p - newest_tokens < j <= p

    and the output is the softmax over both times the values. A token whose context is at most `whole_tokens` long
    attends to all of it with delta = 0. Every query token has a window of its own, so it makes no difference how a
    prompt is cut into chunks. Memory that no query token of the batch reads may hold anything.

    On a GPU it is one launch, whose shape follows from what the host knows, so that a graph may hold it.

    Args:
        batch: the queries, turned to their positions in the text; their keys and values are in the cache already.
            Decoding requests are prompts of one token.
        cache: keys, turned to their positions in the text, and values, of 16 or 32 bits.
        softmax: how logits become weights, without learned sink logits.
        window: what is read.
        rotation: the model's, with rows for every delta of a context of `max_seq_tokens`.
        output: `[num_tokens, num_query_heads, head_size]`, where to write, contiguous in its last dimension; tokens
            that belong to no request are left as they are, and those of a request without a context become zero.

    Returns:
        `output`; arithmetic in float32, but that a GPU rounds the weights to the queries' dtype.

    Raises:
        ValueError: if shapes disagree, a delta may have no row, or, on a GPU, the cache is packed.
    """
    batch.check(cache.num_kv_heads, cache.head_size)
    cache.check()
    window.check()
    if cache.key_scale is not None or cache.value_scale is not None or batch.query_scale is not None:
        raise ValueError("cache: got 8 bits, allowed: 16 or 32")
    if softmax.sink_logits is not None:
        raise ValueError("sink_logits: got some, allowed: None")
    if not 0 < rotation.rotary_size <= cache.head_size:
        raise ValueError(f"rotation: got {rotation.rotary_size} elements, allowed: 2 to {cache.head_size}")
    farthest = int(window.nearer(torch.tensor(batch.max_seq_tokens - 1)))
    if farthest >= len(rotation.table):
        raise ValueError(f"rotation: got {len(rotation.table)} positions, allowed: at least {farthest + 1}")
    if output.shape != batch.query.shape:
        raise ValueError(f"output: got {list(output.shape)}, allowed: {list(batch.query.shape)}")
    if batch.query.is_cuda:
        from sparse_kernels.rolling_attention import triton

        triton.attend_rolling(batch, cache, softmax, window, rotation, output)
    else:
        reference.attend_rolling(batch, cache, softmax, window, rotation, output)
    return output
