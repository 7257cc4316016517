"""When a decode step stops reading: ART (arXiv 2606.00024)."""

from __future__ import annotations

import torch
from sparse_kernels.page_statistics import PageStatistics
from sparse_kernels.paging import PagedTensor
from sparse_kernels.termination import StopRule, count_visits, visited_pages

from vllm_sparse_plugin.policies import Selection


def select_until_stable(
    selection: Selection,
    rule: StopRule,
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    statistics: PageStatistics | None,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages that are visited before the output is stable. Contexts within the budget are read to the end.

    Args:
        selection: what would be read without termination.
        rule: when reading stops.
        query: `[num_tokens, num_kv_heads, group_size, head_size]`.
        keys: the cached keys.
        values: the cached values.
        statistics: views into the cache, for policies that have them.
        block_table: `[num_tokens, max_blocks]` int64, physical block ids.
        context_lens: `[num_tokens]` int64, tokens that each token attends to, itself included.
        scale: factor of the logits.
        sinks: learned sink logits `[num_query_heads]`.
        softcap: as in `visited_pages`.

    Returns:
        Like that of `Selection.select`, ascending behind the -1s: attention adds the pages up as without termination;
        and what `count_visits` says of the rows that may stop, zeros for the others.
    """
    num_pages = context_lens // selection.page_size
    may_stop = (num_pages > selection.budget_pages)[:, None]
    pages = selection.traverse(query, statistics, block_table, num_pages)
    visited = visited_pages(query, keys, values, block_table, context_lens, pages, scale, rule, sinks, softcap)
    slot = torch.arange(pages.shape[-1], device=pages.device)
    kept = (slot < visited.unsqueeze(-1)) | ~may_stop.unsqueeze(-1)
    counts = count_visits(visited, context_lens, selection.page_size, rule.block_tokens) * may_stop.unsqueeze(-1)
    return torch.where(kept, pages, -1).sort(dim=-1).values, counts
