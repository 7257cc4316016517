"""Entry point of the split-attention operation."""

from __future__ import annotations

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.rules import GroupRouting
from sparse_kernels.split_attention import reference
from sparse_kernels.split_attention.pieces import MAX_SPLITS, Stopping


def split_attention(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    *,
    routing: GroupRouting | None = None,
    stopping: Stopping | None = None,
    splits: int = MAX_SPLITS,
    output: DecodeOutput | None = None,
) -> torch.Tensor:
    """Computes attention of decoding tokens over their context, zero for skipped groups (SinkRouter, Eq. 14; Split-K).

    The host reads no lengths, so launches in a CUDA graph serve every later batch of the same size. The length of a
    context and `splits` alone decide how the context is cut, so the bits of a token's output depend on that token
    alone. Of a skipped group only the key of token 0 is read.

    With `stopping`, attention may stop early (ART, arXiv 2606.00024; see `stopping.pages_until_stable`). A piece is
    then a test interval of the rule. A GPU reads several pieces at a time; pieces read beyond the stop are discarded.
    Contexts that attend densely, and contexts without a complete page, are read to the end.

    Args:
        batch: the decoding requests.
        cache: keys and values.
        softmax: how logits become weights.
        routing: which KV groups are skipped, unless their context attends densely; None skips no group.
        stopping: when attention stops; None for never.
        splits: the most pieces of a context without `stopping`. More pieces fill a GPU with fewer contexts, and take
            memory: one float32 output per token, query head and piece. `splits_for` returns a number.
        output: where to write; a new tensor of the query's dtype (bfloat16 for a float8 query) by default.

    Returns:
        The output's heads, `[num_tokens, num_query_heads, head_size]`.

    Raises:
        ValueError: if shapes disagree or `splits` is out of range. On CUDA with `stopping` also for more than 16 query
            heads per KV head.
    """
    batch.check(cache.num_kv_heads, cache.head_size)
    cache.check()
    softmax.check(batch.query.shape[1])
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits: got {splits}, allowed: 1 to {MAX_SPLITS}")
    if routing is not None:
        routing.check(cache.num_kv_heads)
    if stopping is not None:
        stopping.rule.check(cache.page_size)
    output = DecodeOutput.like(batch.query) if output is None else output
    output.check(batch, cache.num_kv_heads)
    if batch.pages is not None or output.pages is not None:
        raise ValueError("pages: got lists of pages, allowed: None where every page is read")
    if batch.num_tokens == 0:
        return output.heads
    implementation = reference.split_attention
    if batch.query.is_cuda:
        from sparse_kernels.split_attention import cuda

        implementation = cuda.split_attention
    elif compiles_for_cpu(batch, cache, softmax, routing):
        from sparse_kernels.split_attention import cpu

        implementation = cpu.split_attention
    implementation(batch, cache, softmax, routing, stopping, splits, output)
    return output.heads


def compiles_for_cpu(batch: DecodeBatch, cache: KVCache, softmax: Softmax, routing: GroupRouting | None) -> bool:
    """Returns whether the operations of a decode step are compiled for a CPU. Otherwise the reference runs."""
    dtypes = {batch.query.dtype, cache.keys.view.dtype, cache.values.view.dtype}
    is_scaled = any(scale is not None for scale in (batch.query_scale, cache.key_scale, cache.value_scale))
    # Sink logits belong to the heads of a layer, and routed groups become layers of one group.
    has_sinks = routing is not None and softmax.sink_logits is not None
    return batch.query.device.type == "cpu" and dtypes == {torch.bfloat16} and not is_scaled and not has_sinks
