"""Ends a decode step's reading when its output is stable: ART (arXiv 2606.00024)."""

from __future__ import annotations

import torch
from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.stopping import StopRule, count_reads, pages_until_stable

from vllm_sparse_plugin.policies import Selection


def select_until_stable(
    selection: Selection, rule: StopRule, tokens: QueryTokens, cache: KVCache, softmax: Softmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects the pages that are read before the output is stable. A context within the budget is read to the end.

    Args:
        selection: the selection without stopping.
        rule: the stop rule.
        tokens: the query tokens.
        cache: the cache.
        softmax: how logits become weights.

    Returns:
        Pages as from `Selection.select`: -1 entries first, then ascending, so that attention adds them up in the same
        order as without stopping. Counts as from `count_reads`, zero for rows that cannot stop.
    """
    num_pages = tokens.num_pages(selection.page_size)
    may_stop = (num_pages > selection.budget_pages)[:, None]
    pages = selection.reading_order(tokens.query, cache.statistics, tokens.block_table, num_pages)
    pages_read = pages_until_stable(tokens, cache, pages, softmax, rule)
    slot = torch.arange(pages.shape[-1], device=pages.device)
    is_read = (slot < pages_read.unsqueeze(-1)) | ~may_stop.unsqueeze(-1)
    reads = count_reads(pages_read, tokens.context_lens, selection.page_size, rule.block_tokens)
    return torch.where(is_read, pages, -1).sort(dim=-1).values, reads * may_stop.unsqueeze(-1)
