"""Decode steps on a CPU: tokens with one budget together, by the operations that are compiled for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.group_routing import route_groups
from sparse_kernels.page_lists import attended_pages, chosen_pages
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_topk import best_first, select_pages
from sparse_kernels.rules import GroupRouting, StopRule
from sparse_kernels.sparse_attention import attend_pages
from sparse_kernels.split_attention.pieces import Stopping
from sparse_kernels.stopping import count_reads, pages_until_stable


def split_attention(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    routing: GroupRouting | None,
    stopping: Stopping | None,
    splits: int,  # only on a GPU
    output: DecodeOutput,
) -> None:
    """See `api.split_attention`."""
    lengths = batch.num_pages(cache.page_size).tolist()
    sink_pages, rule = (0, None) if stopping is None else (stopping.sink_pages, stopping.rule)
    budgets = [max(lengths) if rule is not None and length else None for length in lengths]
    unscored = replace(cache, statistics=None)
    decode_tokens(batch, unscored, softmax, PageSelection(1, sink_pages), budgets, routing, rule, output)


def decode_tokens(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    selection: PageSelection,
    budgets: Sequence[int | None],
    routing: GroupRouting | None,
    rule: StopRule | None,
    output: DecodeOutput,
) -> None:
    """Routes, selects and attends. Each row takes the time and memory of its own budget.

    Args:
        batch: the decoding requests.
        cache: keys and values, with statistics if scores select.
        softmax: how logits become weights.
        selection: which pages are always read, and how pages are scored.
        budgets: pages that each token reads; None for tokens that read their whole context.
        routing: which KV groups are skipped; None for none.
        rule: when attention stops; None for never.
        output: where to write.
    """
    tokens, groups = batch.query_tokens(cache.num_kv_heads), defaultdict(list)
    for token, (context, is_dense) in enumerate(zip(tokens.context_lens.tolist(), _are_dense(batch), strict=True)):
        # Padding has no context.
        if context > 0:
            groups[None if is_dense else budgets[token], routing is not None and not is_dense].append(token)
    if routing is not None or sum(map(len, groups.values())) < batch.num_tokens:
        output.heads.zero_()
        if output.pages_read is not None:
            output.pages_read.zero_()
    if output.pages is not None:
        output.pages.fill_(-1)
    for (budget, is_routed), members in groups.items():
        of_group = slice(None) if len(members) == batch.num_tokens else torch.tensor(members)
        part, part_cache = tokens[of_group], cache
        place: tuple[torch.Tensor | slice, ...] = (of_group,)
        if routing is not None and is_routed:
            skipped = route_groups(part, cache.keys, routing)
            if routing.counts is not None:
                every = torch.full((cache.num_kv_heads,), len(members))
                routing.counts.add_(torch.stack([skipped.sum(dim=0), every], dim=1))
            # Each remaining KV group becomes a token of its own, over a cache of one KV head.
            row, head = (~skipped).nonzero(as_tuple=True)
            place, part_cache = (torch.tensor(members)[row, None], head[:, None]), cache.by_head
            blocks = part.block_table[row] * cache.num_kv_heads + head[:, None]
            part = QueryTokens(tokens.query[place], blocks, part.context_lens[row])
        if len(part):
            _attend(part, part_cache, softmax, selection, budget, rule, batch.pages, output, place)


def _are_dense(batch: DecodeBatch) -> list[bool]:
    if batch.dense_tokens == 0 and batch.dense_requests is None:
        return [False] * batch.num_tokens
    dense: list[bool] = batch.is_dense().tolist()
    return dense


def _attend(
    tokens: QueryTokens,
    cache: KVCache,
    softmax: Softmax,
    selection: PageSelection,
    budget: int | None,
    rule: StopRule | None,
    given: torch.Tensor | None,
    output: DecodeOutput,
    place: tuple[torch.Tensor | slice, ...],
) -> None:
    """Attends with tokens of one budget, and writes to their `place` in the output's `[num_tokens, num_kv_heads]`."""
    num_pages, num_kv_heads = tokens.num_pages(cache.page_size), cache.num_kv_heads
    if budget is not None and given is not None:
        chosen = attended_pages(given[place], num_pages, budget)
    elif budget is not None and cache.statistics is not None:
        always = selection.sink_pages, selection.recent_pages
        scores = score_pages(
            tokens.query, cache.statistics, tokens.block_table, num_pages, selection.std_weight, selection.refined
        )
        chosen = select_pages(scores, num_pages, budget, *always)
        if rule is not None:
            chosen = best_first(chosen, scores, num_pages, *always)
    else:
        chosen = _by_position(num_pages, budget, selection.sink_pages, rule is not None).expand(-1, num_kv_heads, -1)
    if output.pages is not None and budget is not None:
        output.pages[place] = chosen_pages(chosen, num_pages, selection.k, budget)
    if rule is not None:
        stop = (chosen >= 0).sum(dim=-1)
        if budget is not None:
            stop = pages_until_stable(tokens, cache, chosen.contiguous(), softmax, rule)
            # Attention that stops adds up its terms in the order of attention that does not.
            chosen = torch.where(torch.arange(chosen.shape[-1]) < stop[..., None], chosen, -1).sort(dim=-1).values
        if output.pages_read is not None:
            output.pages_read[place] = stop.to(output.pages_read.dtype)
        if output.counters is not None and budget is not None:
            reads = count_reads(stop, tokens.context_lens, cache.page_size, rule.block_tokens)
            # A row without a token reads nothing.
            is_empty = (stop == 0) & (tokens.context_lens % cache.page_size == 0)[:, None]
            reads = reads.masked_fill(is_empty[..., None], 0)
            # The number of each KV head, if every row has its own.
            head = place[1] if len(place) > 1 else torch.arange(num_kv_heads).expand(reads.shape[:2])
            assert isinstance(head, torch.Tensor)
            output.counters.index_put_((head,), reads, accumulate=True)
    heads = attend_pages(tokens, cache, chosen, softmax).unflatten(1, (num_kv_heads, -1))
    of_groups = output.heads.unflatten(1, (output.heads.shape[1] // heads.shape[2], -1))
    of_groups[place] = heads.to(of_groups.dtype)


def _by_position(num_pages: torch.Tensor, budget: int | None, sink_pages: int, newest_first: bool) -> torch.Tensor:
    """Returns the sink pages, then the newest pages, `[num_tokens, 1, n]`, -1 behind the last; every page in the order
    of the text without a budget."""
    slot, total = torch.arange(int(num_pages.max()) if budget is None else budget), num_pages[:, None]
    pages = slot.expand(len(total), -1)
    if budget is not None:
        newest = total - 1 - (slot - sink_pages) if newest_first else total - budget + slot
        pages = torch.where(slot < sink_pages, slot, newest)
    return torch.where(slot < total, pages, -1)[:, None]
