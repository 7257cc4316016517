"""Prefills sparsely in torch, request by request: the specification, and the CPU path.

It reads keys and values page by page, so it supports any packing of the cache.
"""

from __future__ import annotations

import torch

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.paging import PagedTensor
from sparse_kernels.token_prefill.probes import draw_probes
from sparse_kernels.token_prefill.rule import TokenRule
from sparse_kernels.token_prefill.tokens import KeptTokens, choose_tokens

_QUERIES_AT_ONCE = 64
"""Query tokens whose logits are in memory at the same time."""


def token_prefill(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    rule: TokenRule,
    output: torch.Tensor,
    probes: torch.Tensor | None,
) -> KeptTokens:
    """See `api.token_prefill`."""
    if probes is None:
        probes = draw_probes(batch, rule)
    output.zero_()
    sums = column_sums(batch, cache, softmax, probes)
    kept = choose_tokens(sums, probes, batch, rule)
    if rule.others == "attend":
        attend_all(batch, cache, softmax, kept, rule, output)
    else:
        attend_kept(batch, cache, softmax, kept, output)
    return kept


def column_sums(
    batch: PrefillBatch, cache: KVCache, softmax: Softmax, probes: torch.Tensor, by_head: bool = False
) -> torch.Tensor:
    """Adds up the attention of the probe rows on each token (ZipVL, Eq. A and 6).

    Args:
        batch: the requests that prefill.
        cache: their keys and values.
        softmax: how logits become weights.
        probes: `[num_requests, num_probes]` int32, positions of the probe rows; -1 for none.
        by_head: whether each KV head has separate sums.

    Returns:
        `[num_requests, max_seq_tokens]` float32, a_j; 0 beyond a context. With `by_head`,
        `[num_requests, num_kv_heads, max_seq_tokens]`.
    """
    sets = cache.num_kv_heads if by_head else 1
    sums = torch.zeros(batch.num_requests, sets, batch.max_seq_tokens, device=batch.query.device)
    for request in range(batch.num_requests):
        length, end = int(batch.seq_lens[request]), int(batch.query_start[request + 1])
        rows = probes[request][probes[request] >= 0].long()
        if len(rows) == 0:
            continue
        query = _scaled(batch, batch.query[end - length + rows])
        every = torch.arange(length, device=query.device)
        for head in range(cache.num_kv_heads):
            keys = _tokens(cache.keys, batch.block_table[request], head, every)
            of_head = slice(
                head * query.shape[1] // cache.num_kv_heads, (head + 1) * query.shape[1] // cache.num_kv_heads
            )
            weights = _weights(query[:, of_head], keys, every <= rows[:, None], cache, softmax, of_head)
            sums[request, head if by_head else 0, :length] += weights.sum(dim=(0, 1))
    return sums if by_head else sums[:, 0]


def attend_kept(batch: PrefillBatch, cache: KVCache, softmax: Softmax, kept: KeptTokens, output: torch.Tensor) -> None:
    """Attends with the queries in T to the keys and values in T; other outputs do not change."""
    group = batch.group_size(cache.num_kv_heads)
    for request in range(batch.num_requests):
        length, start, end = int(batch.seq_lens[request]), *batch.query_start[request : request + 2].tolist()
        if start == end:
            continue
        positions = kept.positions[request, : int(kept.counts[request])].long()
        rows = positions[positions >= length - (end - start)]
        for head in range(cache.num_kv_heads):
            of_head = slice(head * group, (head + 1) * group)
            keys, values = _keys_and_values(batch, cache, request, head, positions)
            for some in rows.split(_QUERIES_AT_ONCE):
                tokens = end - length + some
                query = _scaled(batch, batch.query[tokens, of_head])
                attended = _weights(query, keys, positions <= some[:, None], cache, softmax, of_head) @ values
                output[tokens, of_head] = attended.transpose(0, 1).to(output.dtype)


def attend_all(
    batch: PrefillBatch, cache: KVCache, softmax: Softmax, kept: KeptTokens, rule: TokenRule, output: torch.Tensor
) -> None:
    """Attends with every query to the tokens in T before it and to the tokens of its window."""
    group = batch.group_size(cache.num_kv_heads)
    for request in range(batch.num_requests):
        length, start, end = int(batch.seq_lens[request]), *batch.query_start[request : request + 2].tolist()
        if start == end:
            continue
        every = torch.arange(length, device=output.device)
        for head in range(cache.num_kv_heads):
            of_head = slice(head * group, (head + 1) * group)
            keys, values = _keys_and_values(batch, cache, request, head, every)
            for rows in every[length - (end - start) :].split(_QUERIES_AT_ONCE):
                is_near = every >= rule.window_start(rows)[:, None]
                seen = (every <= rows[:, None]) & (kept.mask[request, :length] | is_near)
                columns = seen.any(dim=0).nonzero()[:, 0]
                tokens = end - length + rows
                query = _scaled(batch, batch.query[tokens, of_head])
                weights = _weights(query, keys[columns], seen[:, columns], cache, softmax, of_head)
                output[tokens, of_head] = (weights @ values[columns]).transpose(0, 1).to(output.dtype)


def _scaled(batch: PrefillBatch, query: torch.Tensor) -> torch.Tensor:
    return query.float() if batch.query_scale is None else query.float() * batch.query_scale


def _keys_and_values(
    batch: PrefillBatch, cache: KVCache, request: int, head: int, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (_tokens(part, batch.block_table[request], head, positions) for part in (cache.keys, cache.values))
    return keys, values if cache.value_scale is None else values * cache.value_scale


def _tokens(paged: PagedTensor, blocks: torch.Tensor, head: int, positions: torch.Tensor) -> torch.Tensor:
    """Returns a KV head's keys or values at some positions: `[len(positions), head_size]` float32, not scaled."""
    pages, inverse = torch.unique(positions // paged.page_size, return_inverse=True)
    block = blocks.long()[pages // paged.pages_per_block]
    gathered = paged.gather(block, torch.tensor(head, device=block.device), pages % paged.pages_per_block)
    return gathered[inverse, positions % paged.page_size].float()


def _weights(
    query: torch.Tensor,
    keys: torch.Tensor,
    seen: torch.Tensor,
    cache: KVCache,
    softmax: Softmax,
    heads: slice,
) -> torch.Tensor:
    """Returns the attention of some query heads of a KV head: `[group_size, queries, keys]`.

    Args:
        query: `[queries, group_size, head_size]` float32.
        keys: `[keys, head_size]` float32, not scaled.
        seen: `[queries, keys]` bool, the keys that each query attends to.
        cache: for the scale of its keys.
        softmax: how logits become weights.
        heads: the query heads.
    """
    logits = (query.transpose(0, 1) @ keys.T).mul_(cache.scaled_by_keys(softmax.scale))
    if softmax.softcap:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    logits.masked_fill_(~seen, -torch.inf)
    if softmax.sink_logits is not None:
        sink = softmax.sink_logits[heads].float()[:, None, None].expand(-1, len(seen), 1)
        logits = torch.cat([logits, sink], dim=-1)
    return logits.softmax(dim=-1)[..., : len(keys)]
