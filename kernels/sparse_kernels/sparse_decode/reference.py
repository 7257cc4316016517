"""A decode step in torch: the specification."""

from __future__ import annotations

import torch

from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.group_routing.api import GROUP_SCORES
from sparse_kernels.group_routing.reference import score_groups
from sparse_kernels.page_score.reference import score_pages
from sparse_kernels.page_statistics import PageStatistics
from sparse_kernels.page_topk.reference import select_pages
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_attention.reference import attend_pages


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
    query_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """See `api.sparse_decode`; each token alone."""
    per_request = len(query) // len(seq_lens)
    num_kv_heads = keys.num_kv_heads
    out.zero_()
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
        lengths = torch.tensor([context // keys.page_size], device=query.device)
        whole = context <= dense_tokens or bool(dense_requests is not None and dense_requests[request])
        if whole or int(lengths) <= k:
            pages = torch.arange(int(lengths), device=query.device).expand(1, num_kv_heads, -1)
        elif statistics is None:
            kept = torch.arange(k, device=query.device)
            pages = torch.where(kept < sink_pages, kept, int(lengths) - k + kept).expand(1, num_kv_heads, -1)
        else:
            scores = score_pages(grouped, statistics, table, lengths, std_weight)
            pages = select_pages(scores, lengths, k, sink_pages, recent_pages)
        attended = attend_pages(
            grouped, keys, values, table, torch.tensor([context], device=query.device), pages, factor, sinks, softcap
        )
        out[token] = (attended[0] * (1.0 if value_scale is None else value_scale)).to(out.dtype)
        exempt = context <= dense_tokens or bool(dense_requests is not None and dense_requests[request])
        if routing is not None and not exempt:
            scores = score_groups(grouped, keys, table[:, 0], GROUP_SCORES.index(routing.score))
            skipped = (scores >= routing.thresholds(torch.tensor([context], device=query.device)))[0]
            out[token].unflatten(0, (num_kv_heads, -1))[skipped] = 0
            if routing.counts is not None:
                routing.counts.add_(torch.stack([skipped, torch.ones_like(skipped)], dim=1))
