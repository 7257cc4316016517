"""Entry point of the routed-attention operation."""

from __future__ import annotations

import torch

from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.group_routing.api import check_routing
from sparse_kernels.paging import PagedTensor
from sparse_kernels.routed_attention import reference
from sparse_kernels.sparse_decode.api import check_batch, check_rule, output_for
from sparse_kernels.termination import StopRule

SPLITS = 64
"""Pieces of a context, at most, that are attended side by side without a rule."""
PIECES_BYTES = 1 << 30
"""Memory, at most, for what is kept of the pieces of contexts; a batch that needs more is attended in parts."""


def stop_scratch(num_rows: int, context_tokens: int, rule: StopRule, device: torch.device) -> torch.Tensor:
    """The `scratch` of `routed_attention` under a rule.

    Args:
        num_rows: query tokens of a batch times KV heads, at most. Batches of more are attended in parts.
        context_tokens: tokens that a row of the block table has room for.
        rule: when attention stops.
        device: where it is used.

    Returns:
        `[n]` int32 zeros. Every call leaves zeros behind, so calls that follow each other may share it.
    """
    numbers = num_rows * scratch_numbers(pieces_of(context_tokens, rule))
    return torch.zeros(numbers, dtype=torch.int32, device=device)


def pieces_of(context_tokens: int, rule: StopRule) -> int:
    """Pieces of the longest context under a rule: its blocks."""
    return max(1, -(-context_tokens // rule.block_tokens))


def scratch_numbers(pieces: int) -> int:
    """Numbers by which the blocks of a row tell each other what is done: `RowMarks` in marks.cuh."""
    return 2 + pieces


def rows_at_once(pieces: int, group_size: int, head_size: int) -> int:
    """Rows whose pieces `PIECES_BYTES` hold."""
    return max(1, PIECES_BYTES // (pieces * group_size * (head_size + 2) * 4))


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
    rule: StopRule | None = None,
    sink_pages: int = 0,
    sinks: torch.Tensor | None = None,
    visited: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of decoding tokens over their whole context, zero for sink groups (SinkRouter, Eq. 14, and Split-K).

    Decided on the device alone: no length is read by the host, and launches captured in a CUDA graph serve every later
    batch of their size. How a context is split follows from its length and from `splits`, so the bits of a token's
    output depend on that token alone. Of a sink group nothing is read but token 0's key.

    With a `rule`, attention may stop early (ART, arXiv 2606.00024; see `termination.visited_pages`): the first
    `sink_pages` are visited first, then the newest page and those before it. A piece is then a block of the rule, and
    on a GPU several are read at a time: some beyond the stop may have been read, but count for nothing. Contexts that
    are not routed because they are short or their request says so, and those without a complete page, are read to the
    end.

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
        dense_tokens: contexts up to this length are not routed and do not stop.
        dense_requests: `[num_requests]` bool, requests that are not routed and do not stop.
        softcap: logits become `softcap * tanh(logits / softcap)`; 0 for none.
        query_scale: one float32; a float8 query times this is the query.
        key_scale: one float32; a float8 key times this is the key.
        value_scale: one float32; a float8 value times this is the value.
        splits: pieces of a context, at most, without a rule. More of them fill a GPU with fewer contexts, and take
            memory: for each token, query head and piece the float32 of an output.
        out: `[num_tokens, num_query_heads, head_size]` float16 or bfloat16 to write to, rows of heads contiguous.
        rule: when attention stops; None if it reads everything.
        sink_pages: leading pages that are visited first, under a rule.
        sinks: learned sink logits `[num_query_heads]` float32, under a rule.
        visited: `[num_tokens, num_kv_heads]` int32 to write the number of pages visited to, under a rule; 0 for skipped
            groups.
        counters: `[num_kv_heads, 4]` int64 to add to, by rows that may stop and are not skipped: 1, blocks visited,
            tokens visited, tokens of the context.
        scratch: what `stop_scratch` returns. Without it, and if it does not hold a request, the call makes its own.

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
    if rule is not None:
        check_rule(rule, keys)
    elif sinks is not None:
        raise ValueError("sinks: got learned ones without a rule, allowed: None")
    out = output_for(query) if out is None else out
    if len(query) == 0:
        return out
    implementation = reference.routed_attention
    if query.is_cuda:
        from sparse_kernels.routed_attention import cuda

        implementation = cuda.routed_attention
    implementation(
        query, keys, values, block_table, seq_lens, routing, scale, dense_tokens, dense_requests, softcap, query_scale,
        key_scale, value_scale, splits, out, rule, sink_pages, sinks, visited, counters, scratch,
    )  # fmt: skip
    return out
