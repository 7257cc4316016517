"""Counts the pages of a coverage in torch: the specification."""

from __future__ import annotations

import torch

from sparse_kernels.batch import PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_coverage.estimate import page_logits
from sparse_kernels.page_coverage.rule import Limits
from sparse_kernels.sparse_attention.reference import logits_and_values


def known_logits(
    token: QueryTokens, cache: KVCache, selection: PageSelection, softmax: Softmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logarithm of what the always-read tokens add to the denominator, and their pages.

    Args:
        token: one query token.
        cache: keys and values.
        selection: the pages that are always read, besides the incomplete one.
        softmax: how logits become weights.

    Returns:
        `[num_kv_heads, group_size]` float32, -inf for none; and `[num_pages]` bool, the always-read pages.
    """
    num_pages = int(token.num_pages(cache.page_size))
    page = torch.arange(num_pages, device=token.query.device)
    always = (page < selection.sink_pages) | (page >= num_pages - selection.recent_pages)
    pages = page[always].expand(1, cache.num_kv_heads, -1)
    return logits_and_values(token, cache, pages, softmax)[0].logsumexp(dim=-1), always


def count_best(
    logits: torch.Tensor, known: torch.Tensor, always: torch.Tensor, key: torch.Tensor, share: float
) -> torch.Tensor:
    """Counts the best pages whose estimated share of the attention reaches a target. Always-read pages are included.

    Args:
        logits: `[..., num_kv_heads, group_size, num_pages]` float32, log of what each page adds to the denominator.
        known: `[..., num_kv_heads, group_size]` float32, log of what the always-read tokens add.
        always: bool, the pages that are always read; it broadcasts to `key`.
        key: `[..., num_kv_heads, num_pages]` float32, the rank of pages, highest for those always read.
        share: the target; 1 or more counts every page.

    Returns:
        `[..., num_kv_heads]` int64.
    """
    logits = logits.masked_fill(always.unsqueeze(-2), -torch.inf)
    total = torch.logaddexp(logits.logsumexp(dim=-1), known)
    shares = (logits - total[..., None]).exp().mean(dim=-2).double()
    missing = share - (known - total).exp().mean(dim=-1).double()
    ranked = key.sort(dim=-1, descending=True, stable=True).indices
    count = (shares.gather(-1, ranked).cumsum(dim=-1) < missing[..., None]).sum(dim=-1) + 1
    return torch.full_like(count, key.shape[-1]) if share >= 1 else count


def count_pages(
    tokens: QueryTokens,
    cache: KVCache,
    scores: torch.Tensor,
    selection: PageSelection,
    softmax: Softmax,
    limits: Limits,
) -> torch.Tensor:
    """See `api.count_pages`."""
    counts = limits.least[:, None].repeat(1, cache.num_kv_heads)
    assert cache.statistics is not None
    for index in range(len(tokens)):
        token, least = tokens[index : index + 1], int(limits.least[index])
        num_pages = int(token.num_pages(cache.page_size))
        if num_pages <= least or least == int(limits.most[index]):
            continue
        known, always = known_logits(token, cache, selection, softmax)
        blocks = token.block_table[0, : -(-num_pages // cache.statistics.pages_per_block)].long()
        keys = cache.statistics.summaries(blocks)[0]
        logits = page_logits(token.query[0], keys[:, :num_pages], cache.page_size, softmax)
        # Always-read pages come first. A NaN ranks like -inf, as in `select_pages`.
        key = scores[index, :, :num_pages].float()
        key = key.masked_fill(key.isnan(), -torch.inf).masked_fill(always, torch.inf)
        count = count_best(logits, known, always, key, float(limits.share[index]))
        counts[index] = count.clamp(least, min(int(limits.most[index]), num_pages))
    return counts
