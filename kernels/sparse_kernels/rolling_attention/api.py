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
    """Computes attention to the first and the newest tokens, as if the first tokens were directly before the window.

    StreamingLLM (arXiv 2309.17453) counts positions within the cache: in each step it rotates the keys of S, the first
    `sink_tokens` tokens, again. Logits depend only on the distance of two positions. Rotating the query back has the
    same effect, and the cache does not change. With the query q at position p, rotated by R_p, the keys k_j, rotated by
    R_j, and delta = p - (cache_tokens - 1):

        logit_j = scale (R_delta^T q) . k_j  for j in S;    scale q . k_j  for p - newest_tokens < j <= p

    The output is the softmax over both times the values. A token whose context has at most `whole_tokens` tokens
    attends to all of it with delta = 0. Every query token has its own window, so the result does not depend on how a
    prompt is cut into chunks. Memory that no query token of the batch reads may hold anything.

    On a GPU it is one launch. Its shape depends only on numbers that the host knows, so a CUDA graph may hold it.

    Args:
        batch: the queries, rotated to their positions in the text. Their keys and values are already in the cache.
            Decoding requests are prompts of one token.
        cache: keys, rotated to their positions in the text, and values, with 16 or 32 bits.
        softmax: how logits become weights, without learned sink logits.
        window: the tokens to read.
        rotation: the model's rotation, with rows for every delta of a context of `max_seq_tokens`.
        output: `[num_tokens, num_query_heads, head_size]`, where to write, contiguous in its last dimension. Tokens
            of no request are unchanged; tokens of a request without a context become zero.

    Returns:
        `output`. Arithmetic is in float32, except that a GPU rounds the weights to the queries' dtype.

    Raises:
        ValueError: if shapes disagree, a delta has no row, or, on a GPU, the cache is packed.
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
