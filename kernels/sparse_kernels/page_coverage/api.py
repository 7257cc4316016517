"""Entry point of the page-coverage operation."""

from __future__ import annotations

import torch

from sparse_kernels.batch import PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_coverage import reference
from sparse_kernels.page_coverage.rule import Coverage


def count_pages(
    tokens: QueryTokens,
    cache: KVCache,
    scores: torch.Tensor,
    selection: PageSelection,
    softmax: Softmax,
    coverage: Coverage,
) -> torch.Tensor:
    """Counts the best pages that carry a share of the attention weight, as the page statistics estimate it.

    All B keys of a page are taken to be the one of its record's keys x_1..x_V that matches the query best, as in sparse
    prefill: what a mean of keys underestimates and the largest of several means overestimates is about the same. Those
    of the pages that are always read and of the incomplete page are known. So for a query head q, e(x) = exp(s q . x),

        m_p = B max_j e(x_pj)        Z = sum over known tokens i of e(k_i) + sum over other pages p of m_p

    and what is read carries the share (Z - sum over unread p of m_p) / Z, whose mean over the heads of the group is to
    reach the target. Pages are read as `select_pages` ranks them: those always read, then by descending score, ties to
    the lowest page. A softcap applies to the products; learned sink logits do not count.

    Args:
        tokens: the query tokens.
        cache: keys and statistics; of a kind whose vectors are keys and that has no spread.
        scores: `[num_tokens, num_kv_heads, max_pages]` bfloat16, see `score_pages`.
        selection: the pages that are always read; `k` does not count.
        softmax: how logits become weights.
        coverage: the target of each token, and how many pages it reads at least and at most.

    Returns:
        `[num_tokens, num_kv_heads]` int64 for `select_pages`. A row's number depends on that row alone.

    Raises:
        ValueError: if the shapes disagree, or for statistics without an estimate.
    """
    num_tokens, num_kv_heads = tokens.query.shape[:2]
    cache.check()
    tokens.check(cache.num_kv_heads, cache.head_size)
    statistics = cache.statistics
    if statistics is None or statistics.kind.codes is None:
        name = "none" if statistics is None else statistics.kind.name
        raise ValueError(f"statistics: got {name}, allowed: quarters or sketch")
    coverage.check(num_tokens, selection.sink_pages + selection.recent_pages)
    if scores.shape[:2] != (num_tokens, num_kv_heads) or scores.dtype != torch.bfloat16:
        raise ValueError(
            f"scores: got {list(scores.shape)} {scores.dtype}, allowed: [{num_tokens}, {num_kv_heads}, pages] "
            "torch.bfloat16"
        )
    if num_tokens == 0:
        return coverage.least[:, None].expand(0, num_kv_heads)
    implementation = reference.count_pages
    keys = cache.keys.view
    if keys.device.type == "cpu" and tokens.query.dtype == keys.dtype == torch.bfloat16:
        from sparse_kernels.page_coverage import cpu

        implementation = cpu.count_pages
    return implementation(tokens, cache, scores, selection, softmax, coverage)
