"""Entry point of the sparse-decode operation."""

from __future__ import annotations

import torch

from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.group_routing.api import check_routing
from sparse_kernels.page_statistics import PageStatistics
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_decode import reference
from sparse_kernels.termination import StopRule


def sparse_decode(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    statistics: PageStatistics | None,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    k: int,
    sink_pages: int,
    recent_pages: int,
    std_weight: float,
    scale: float,
    dense_tokens: int = 0,
    dense_requests: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    routing: GroupRouting | None = None,
    rule: StopRule | None = None,
    query_scale: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    visited: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of decoding tokens over the `k` best pages of their context (UNIQUE, Eq. 3, 5 and 6).

    The same as `score_pages`, `select_pages` and `attend_pages` one after the other, decided on the device alone: no
    length is read by the host, and a launch captured in a CUDA graph serves every later batch of its size. The bits
    of a token's output depend on that token alone.

    With a `rule`, attention may stop early (ART, arXiv 2606.00024; see `termination.visited_pages`): pages that are
    always selected are visited first, then the others best score first, or newest first without statistics. Contexts
    that are attended whole because they are short or their request says so are read to the end.

    Every request has the same number of query tokens, the last of its context; they are consecutive.

    Args:
        query: `[num_tokens, num_query_heads, head_size]`, any strides but a contiguous last dimension.
        keys: the cached keys.
        values: the cached values, in the keys' block.
        statistics: views of the cache's statistics; None selects the `sink_pages` first and the newest other pages.
        block_table: `[num_requests, max_blocks]` int32, physical block ids.
        seq_lens: `[num_requests]` int32, tokens of each request's context, its query tokens included. A query token
            without a context (a padded request) has a zero output.
        k: complete pages to select, besides the incomplete last one.
        sink_pages: leading pages that are always selected.
        recent_pages: newest complete pages that are always selected.
        std_weight: lambda, the weight of the standard deviation in the score.
        scale: factor of the logits, usually `head_size ** -0.5`.
        dense_tokens: contexts up to this length are attended whole; so are those of at most `k` pages.
        dense_requests: `[num_requests]` bool, requests that are attended whole whatever their length.
        sinks: learned sink logits `[num_query_heads]` float32.
        softcap: logits become `softcap * tanh(logits / softcap)`; 0 for none.
        routing: which KV groups have a zero output instead: of contexts beyond `dense_tokens`, but not of
            `dense_requests`. Nothing of theirs is read but token 0's key; statistics that are scored by another kernel
            are scored for them too. None for no such groups.
        rule: when attention stops; None if it reads everything. Blocks of fewer than 512 tokens (256 where heads are
            larger than 128 or groups than 8) may change the last bit of an output.
        query_scale: one float32; a float8 query times this is the query. Pages are scored by queries and keys as they
            are stored: positive factors do not change their order.
        key_scale: one float32; a float8 key times this is the key.
        value_scale: one float32; a float8 value times this is the value.
        out: `[num_tokens, num_query_heads, head_size]` float16 or bfloat16 to write to, rows of heads contiguous.
        visited: `[num_tokens, num_kv_heads]` int32 to write the number of pages visited to; 0 for skipped groups.
        counters: `[num_kv_heads, 4]` int64 to add to, by rows that may stop and are not skipped: 1, blocks visited,
            tokens read, tokens of the context.

    Returns:
        `out`, or a new tensor in the query's dtype (bfloat16 for a float8 query).

    Raises:
        ValueError: if the shapes disagree or a dtype is not supported.
    """
    check_batch(query, keys, block_table, seq_lens)
    if routing is not None:
        check_routing(routing, keys.num_kv_heads)
    if rule is not None:
        check_rule(rule, keys)
    if k < max(sink_pages + recent_pages, 1):
        raise ValueError(f"k: got {k}, allowed: at least {max(sink_pages + recent_pages, 1)}")
    out = output_for(query) if out is None else out
    if len(query) == 0:
        return out
    implementation = reference.sparse_decode
    if query.is_cuda:
        from sparse_kernels.sparse_decode import cuda

        implementation = cuda.sparse_decode
    implementation(
        query, keys, values, statistics, block_table, seq_lens, k, sink_pages, recent_pages, std_weight, scale,
        dense_tokens, dense_requests, sinks, softcap, routing, rule, query_scale, key_scale, value_scale, out, visited,
        counters,
    )  # fmt: skip
    return out


def output_for(query: torch.Tensor) -> torch.Tensor:
    """Room for the attention of a query, in its dtype; bfloat16 for a float8 query."""
    dtype = torch.bfloat16 if query.dtype.itemsize == 1 else query.dtype
    return torch.empty(query.shape, dtype=dtype, device=query.device)


def check_rule(rule: StopRule, keys: PagedTensor) -> None:
    """Raises ValueError unless a block of the rule holds whole pages."""
    if rule.block_tokens % keys.page_size or rule.block_tokens < 1:
        raise ValueError(
            f"block_tokens: got {rule.block_tokens}, allowed: a multiple of the page size {keys.page_size}"
        )


def check_batch(query: torch.Tensor, keys: PagedTensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Raises ValueError unless queries, cache, block table and lengths are those of one batch of requests."""
    num_tokens, num_query_heads, head_size = query.shape
    num_requests = len(seq_lens)
    if num_requests == 0 or num_tokens % num_requests:
        raise ValueError(f"query: got {num_tokens} tokens, allowed: a multiple of the {num_requests} requests")
    if num_query_heads % keys.num_kv_heads or head_size != keys.head_size:
        raise ValueError(
            f"query: got {num_query_heads} heads of size {head_size}, allowed: a multiple of {keys.num_kv_heads} "
            f"heads of size {keys.head_size}"
        )
    if len(block_table) != num_requests:
        raise ValueError(f"block_table: got {len(block_table)} rows, allowed: one for each of {num_requests} requests")
