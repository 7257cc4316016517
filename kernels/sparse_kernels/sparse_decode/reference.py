"""The decode step in torch; this is the specification."""

from __future__ import annotations

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_lists import attended_pages, chosen_pages
from sparse_kernels.page_score.reference import score_pages
from sparse_kernels.page_topk import best_first
from sparse_kernels.page_topk.reference import select_pages
from sparse_kernels.rules import GroupRouting, StopRule
from sparse_kernels.split_attention.reference import decode_tokens, sinks_then_newest


def sparse_decode(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    selection: PageSelection,
    routing: GroupRouting | None,
    rule: StopRule | None,
    output: DecodeOutput,
) -> None:
    """See `api.sparse_decode`."""
    budgets = batch.token_budgets()
    if output.pages is not None:
        output.pages.fill_(-1)

    def order(token: QueryTokens, index: int) -> torch.Tensor | None:
        num_pages = token.num_pages(cache.page_size)
        k = selection.k if budgets is None else min(selection.k, int(budgets[index]))
        if int(num_pages) <= k:
            return None
        if batch.pages is not None:
            return attended_pages(batch.pages[index : index + 1], num_pages, k)
        pages = select(token, num_pages, k)
        if output.pages is not None:
            output.pages[index] = chosen_pages(pages, num_pages, selection.k, k)[0]
        return pages

    def select(token: QueryTokens, num_pages: torch.Tensor, k: int) -> torch.Tensor:
        if cache.statistics is None:
            return sinks_then_newest(token, int(num_pages), selection.sink_pages, k)
        scores = score_pages(
            token.query, cache.statistics, token.block_table, num_pages, selection.std_weight, selection.refined
        )
        pages = select_pages(scores, num_pages, k, selection.sink_pages, selection.recent_pages)
        if rule is None:
            return pages
        return best_first(pages, scores, num_pages, selection.sink_pages, selection.recent_pages)

    decode_tokens(batch, cache, softmax, order, routing, rule, output)
