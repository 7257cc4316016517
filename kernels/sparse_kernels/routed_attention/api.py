"""Entry point of the routed-attention operation."""

from __future__ import annotations

import torch

from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.group_routing.api import check_routing
from sparse_kernels.paging import PagedTensor
from sparse_kernels.routed_attention import reference
from sparse_kernels.sparse_decode.api import check_batch, output_for

SPLITS = 64
"""Pieces of a context, at most, that are attended side by side."""


def routed_attention(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    routing: GroupRouting | None,
    scale: float,
    *,
    dense_tokens: int = 0,
    dense_requests: torch.Tensor | None = None,
    softcap: float = 0.0,
    query_scale: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    splits: int = SPLITS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of decoding tokens over their whole context, zero for sink groups (SinkRouter, Eq. 14, and Split-K).

    Decided on the device alone: no length is read by the host, and launches captured in a CUDA graph serve every later
    batch of their size. How a context is split follows from its length and from `splits`, so the bits of a token's
    output depend on that token alone. Of a sink group nothing is read but token 0's key.

    Every request has the same number of query tokens, the last of its context; they are consecutive.

    Args:
        query: `[num_tokens, num_query_heads, head_size]`, any strides but a contiguous last dimension.
        keys: the cached keys.
        values: the cached values, in the keys' block.
        block_table: `[num_requests, max_blocks]` int32, physical block ids.
        seq_lens: `[num_requests]` int32, tokens of each request's context, its query tokens included. A query token
            without a context (a padded request) has a zero output.
        routing: which KV groups are sink groups; None for none.
        scale: factor of the logits, usually `head_size ** -0.5`.
        dense_tokens: contexts up to this length are not routed.
        dense_requests: `[num_requests]` bool, requests that are not routed.
        softcap: logits become `softcap * tanh(logits / softcap)`; 0 for none.
        query_scale: one float32; a float8 query times this is the query.
        key_scale: one float32; a float8 key times this is the key.
        value_scale: one float32; a float8 value times this is the value.
        splits: pieces of a context, at most. More of them fill a GPU with fewer contexts, and take memory: for each
            token, query head and piece the float32 of an output.
        out: `[num_tokens, num_query_heads, head_size]` float16 or bfloat16 to write to, rows of heads contiguous.

    Returns:
        `out`, or a new tensor in the query's dtype (bfloat16 for a float8 query).

    Raises:
        ValueError: if the shapes disagree or a dtype is not supported.
    """
    check_batch(query, keys, block_table, seq_lens)
    if not 1 <= splits <= SPLITS:
        raise ValueError(f"splits: got {splits}, allowed: 1 to {SPLITS}")
    if routing is not None:
        check_routing(routing, keys.num_kv_heads)
    out = output_for(query) if out is None else out
    if len(query) == 0:
        return out
    implementation = reference.routed_attention
    if query.is_cuda:
        from sparse_kernels.routed_attention import cuda

        implementation = cuda.routed_attention
    implementation(
        query, keys, values, block_table, seq_lens, routing, scale, dense_tokens, dense_requests, softcap, query_scale,
        key_scale, value_scale, splits, out,
    )  # fmt: skip
    return out
