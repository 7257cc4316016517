"""Attention of decoding tokens over pages in torch; this is the specification of split attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.group_routing.reference import score_groups
from sparse_kernels.rules import GROUP_SCORES, GroupRouting, StopRule
from sparse_kernels.sparse_attention.reference import attend_pages
from sparse_kernels.split_attention.pieces import Stopping
from sparse_kernels.stopping import count_reads
from sparse_kernels.stopping.reference import pages_until_stable

ReadingOrder = Callable[[QueryTokens, int], torch.Tensor | None]
"""Takes a query token and its index in the batch. Returns its pages in reading order, `[1, num_kv_heads, n]` with -1
for none; None for a context that attends densely."""


def split_attention(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    routing: GroupRouting | None,
    stopping: Stopping | None,
    splits: int,  # only for the fast path
    output: DecodeOutput,
) -> None:
    """See `api.split_attention`: a decode step that reads every page."""

    def order(token: QueryTokens, _: int) -> torch.Tensor | None:
        num_pages = int(token.num_pages(cache.page_size))
        if stopping is None or num_pages == 0:
            return None
        return sinks_then_newest(token, num_pages, stopping.sink_pages, num_pages)

    decode_tokens(batch, cache, softmax, order, routing, stopping.rule if stopping else None, output)


def sinks_then_newest(token: QueryTokens, num_pages: int, sink_pages: int, count: int) -> torch.Tensor:
    """Returns the first `count` pages in reading order, for every KV head: `[1, num_kv_heads, count]`."""
    slot = torch.arange(count, device=token.query.device)
    pages = torch.where(slot < sink_pages, slot, num_pages - 1 - (slot - sink_pages))
    return pages.expand(1, token.query.shape[1], -1)


def decode_tokens(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    order: ReadingOrder,
    routing: GroupRouting | None,
    rule: StopRule | None,
    output: DecodeOutput,
) -> None:
    """Attends with each decoding token over its pages. Arguments are those of `api.sparse_decode`."""
    num_kv_heads = cache.num_kv_heads
    scale = softmax.scale if batch.query_scale is None else softmax.scale * float(batch.query_scale)
    softmax = replace(softmax, scale=scale)
    output.heads.zero_()
    if output.pages_read is not None:
        output.pages_read.zero_()
    for index in range(batch.num_tokens):
        request, position = divmod(index, batch.tokens_per_request)
        context = int(batch.seq_lens[request]) - (batch.tokens_per_request - 1 - position)
        if context <= 0:
            continue
        query = batch.query[index : index + 1].float().unflatten(1, (num_kv_heads, -1))
        table = batch.block_table[request : request + 1].long()
        token = QueryTokens(query, table, torch.tensor([context], device=query.device))
        exempt = context <= batch.dense_tokens
        if batch.dense_requests is not None:
            exempt = exempt or bool(batch.dense_requests[request])
        active = torch.ones(num_kv_heads, dtype=torch.bool, device=query.device)
        if routing is not None and not exempt:
            group_scores = score_groups(query, cache.keys, table[:, 0], GROUP_SCORES.index(routing.score))
            active = ~(group_scores >= routing.thresholds(token.context_lens))[0]
            if routing.counts is not None:
                routing.counts.add_(torch.stack([~active, torch.ones_like(active)], dim=1))
        pages = None if exempt else order(token, index)
        may_stop = pages is not None
        if pages is None:
            every_page = torch.arange(context // cache.page_size, device=query.device)
            pages = every_page.expand(1, num_kv_heads, -1)
        if output.pages is not None:
            output.pages[index, ~active] = -1
        # A list may be empty. A row that reads nothing has a zero output, like a skipped group.
        active &= (pages[0] >= 0).any(dim=-1) | (context % cache.page_size > 0)
        if rule is not None:
            count = (pages >= 0).sum(dim=-1)
            if may_stop:
                count = pages_until_stable(token, cache, pages, softmax, rule)
                pages = torch.where(torch.arange(pages.shape[-1], device=query.device) < count[..., None], pages, -1)
            if output.pages_read is not None:
                output.pages_read[index] = count[0] * active
            if output.counters is not None and may_stop:
                reads = count_reads(count, token.context_lens, cache.page_size, rule.block_tokens)
                output.counters.add_(reads[0] * active[:, None])
        attended = attend_pages(token, cache, pages, softmax)
        output.heads[index] = attended[0].to(output.heads.dtype)
        output.heads[index].unflatten(0, (num_kv_heads, -1))[~active] = 0
