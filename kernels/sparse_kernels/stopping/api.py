"""Entry point of the stopping operation."""

from __future__ import annotations

import torch

from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.rules import StopRule
from sparse_kernels.stopping import reference


def pages_until_stable(
    tokens: QueryTokens, cache: KVCache, pages: torch.Tensor, softmax: Softmax, rule: StopRule
) -> torch.Tensor:
    """Counts the pages that each row reads before its attention stops (ART, Algorithm 1).

    Test intervals of `rule.block_tokens` tokens are read in the order of `pages`. The incomplete last page, the newest
    tokens, is part of the first interval. Stopped attention returns exact attention over the incomplete page and the
    pages read: `attend_pages` over that many first entries of `pages`.

    Args:
        tokens: the query tokens.
        cache: their keys and values.
        pages: `[num_tokens, num_kv_heads, k]` int64, complete pages in reading order, -1 behind the last.
        softmax: how logits become weights; sink logits are part of the denominator of every partial output.
        rule: when to stop.

    Returns:
        `[num_tokens, num_kv_heads]` int64; on CPU all arithmetic is in float32.

    Raises:
        ValueError: if a test interval does not hold whole pages.
    """
    rule.check(cache.page_size)
    if rule.patience == 0 or pages.numel() == 0:
        return (pages >= 0).sum(dim=-1)
    return reference.pages_until_stable(tokens, cache, pages, softmax, rule)


def count_reads(
    pages_read: torch.Tensor, context_lens: torch.Tensor, page_size: int, block_tokens: int
) -> torch.Tensor:
    """Returns what each row of a step adds to the counters of its KV head.

    Args:
        pages_read: `[num_tokens, num_kv_heads]` integer, pages read before the stop.
        context_lens: `[num_tokens]` integer.
        page_size: tokens per page.
        block_tokens: tokens of a test interval.

    Returns:
        `[num_tokens, num_kv_heads, 4]` int64: 1 row, intervals read, tokens read, tokens of the context.
    """
    tokens = pages_read.long() * page_size
    blocks = (tokens + block_tokens - 1) // block_tokens
    contexts = context_lens.long()[:, None].expand_as(tokens)
    return torch.stack([torch.ones_like(tokens), blocks, tokens + contexts % page_size, contexts], dim=-1)
