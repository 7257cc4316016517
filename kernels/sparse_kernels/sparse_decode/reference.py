"""A decode step in torch: the specification."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.group_routing.api import GROUP_SCORES
from sparse_kernels.group_routing.reference import score_groups
from sparse_kernels.page_score.reference import score_pages
from sparse_kernels.page_statistics import PageStatistics
from sparse_kernels.page_topk import best_first
from sparse_kernels.page_topk.reference import select_pages
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_attention.reference import attend_pages
from sparse_kernels.termination import StopRule, count_visits
from sparse_kernels.termination.reference import visited_pages


def sparse_decode(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    statistics: PageStatistics | None,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    k: int,
    sink_pages: int,
    recent_pages: int,
    std_weight: float,
    scale: float,
    dense_tokens: int,
    dense_requests: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softcap: float,
    routing: GroupRouting | None,
    rule: StopRule | None,
    query_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    out: torch.Tensor,
    visited: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> None:
    """See `api.sparse_decode`."""

    def order(grouped: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        num_pages = int(lengths)
        if num_pages <= k:
            return None
        if statistics is None:
            return sinks_then_newest(num_pages, sink_pages, k, grouped)
        scores = score_pages(grouped, statistics, table, lengths, std_weight)
        pages = select_pages(scores, lengths, k, sink_pages, recent_pages)
        return pages if rule is None else best_first(pages, scores, lengths, sink_pages, recent_pages)

    decode_tokens(
        query, keys, values, block_table, seq_lens, order, scale, dense_tokens, dense_requests, sinks, softcap, routing,
        rule, query_scale, key_scale, value_scale, out, visited, counters,
    )  # fmt: skip


def sinks_then_newest(num_pages: int, sink_pages: int, count: int, grouped: torch.Tensor) -> torch.Tensor:
    """The first `count` of a context's pages in that order, for every KV head: `[1, num_kv_heads, count]`."""
    slot = torch.arange(count, device=grouped.device)
    pages = torch.where(slot < sink_pages, slot, num_pages - 1 - (slot - sink_pages))
    return pages.expand(1, grouped.shape[1], -1)


def decode_tokens(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    order: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None],
    scale: float,
    dense_tokens: int,
    dense_requests: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softcap: float,
    routing: GroupRouting | None,
    rule: StopRule | None,
    query_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    out: torch.Tensor,
    visited: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> None:
    """Attention of decoding tokens, each alone, over pages in an order.

    Other arguments are those of `api.sparse_decode`.

    Args:
        order: takes the token's query, grouped, its row of the block table and its number of complete pages. Gives
            pages `[1, num_kv_heads, n]` in the order of their visit; None attends the context whole.
    """
    per_request = len(query) // len(seq_lens)
    num_kv_heads = keys.num_kv_heads
    out.zero_()
    if visited is not None:
        visited.zero_()
    for token in range(len(query)):
        request = token // per_request
        context = int(seq_lens[request]) - (per_request - 1 - token % per_request)
        if context <= 0:
            continue
        grouped = query[token : token + 1].float().unflatten(1, (num_kv_heads, -1))
        factor = scale
        for each in (query_scale, key_scale):
            factor = factor if each is None else factor * float(each)
        table = block_table[request : request + 1].long()
        tokens = torch.tensor([context], device=query.device)
        lengths = tokens // keys.page_size
        exempt = context <= dense_tokens or bool(dense_requests is not None and dense_requests[request])
        active = torch.ones(num_kv_heads, dtype=torch.bool, device=query.device)
        if routing is not None and not exempt:
            group_scores = score_groups(grouped, keys, table[:, 0], GROUP_SCORES.index(routing.score))
            active = ~(group_scores >= routing.thresholds(tokens))[0]
            if routing.counts is not None:
                routing.counts.add_(torch.stack([~active, torch.ones_like(active)], dim=1))
        pages = None if exempt else order(grouped, table, lengths)
        whole = pages is None
        if pages is None:
            pages = torch.arange(int(lengths), device=query.device).expand(1, num_kv_heads, -1)
        if rule is not None:
            count = (pages >= 0).sum(dim=-1)
            if not whole:
                # Tolerances are of the values as they are meant.
                meant = rule._replace(scale_tolerance=rule.scale_tolerance / (float(value_scale) if value_scale else 1))
                count = visited_pages(grouped, keys, values, table, tokens, pages, factor, meant, sinks, softcap)
                pages = torch.where(torch.arange(pages.shape[-1], device=query.device) < count[..., None], pages, -1)
            if visited is not None:
                visited[token] = count[0] * active
            if counters is not None and not whole:
                counters += count_visits(count, tokens, keys.page_size, rule.block_tokens)[0] * active[:, None]
        attended = attend_pages(grouped, keys, values, table, tokens, pages, factor, sinks, softcap)
        out[token] = (attended[0] * (1.0 if value_scale is None else value_scale)).to(out.dtype)
        out[token].unflatten(0, (num_kv_heads, -1))[~active] = 0
