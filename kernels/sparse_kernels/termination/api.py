"""Entry point of the termination operation."""

from __future__ import annotations

import torch

from sparse_kernels.paging import PagedTensor
from sparse_kernels.termination import reference
from sparse_kernels.termination.rule import StopRule


def visited_pages(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    rule: StopRule,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """How many of the pages of each row are visited before its attention stops (ART, Algorithm 1).

    Blocks of `rule.block_tokens` are visited in the order of `pages`. The incomplete last page, the newest tokens, is
    part of the first block. What stopped attention returns is exact attention over the incomplete page and the pages
    visited: `attend_pages` over the first so many of `pages`.

    Args:
        query: `[num_tokens, num_kv_heads, group_size, head_size]`, float16, bfloat16 or float32.
        keys: the cached keys.
        values: the cached values, with the keys' page size.
        block_table: `[num_tokens, max_blocks]` int64, physical block ids of each token's request.
        context_lens: `[num_tokens]` int64, tokens each query token may attend, itself included; at least 1.
        pages: `[num_tokens, num_kv_heads, k]` int64, complete pages in the order of their visit, -1 behind the last.
        scale: factor of the logits.
        rule: when to stop.
        sinks: learned sink logits `[num_query_heads]`; part of the denominator of every partial output.
        softcap: logits become `softcap * tanh(logits / softcap)`; 0 for none.

    Returns:
        `[num_tokens, num_kv_heads]` int64; on CPU all arithmetic is in float32.

    Raises:
        ValueError: if a block does not hold whole pages.
    """
    if rule.block_tokens % keys.page_size or rule.block_tokens < 1:
        raise ValueError(
            f"block_tokens: got {rule.block_tokens}, allowed: a multiple of the page size {keys.page_size}"
        )
    if rule.patience == 0 or pages.numel() == 0:
        return (pages >= 0).sum(dim=-1)
    implementation = reference.visited_pages
    if query.device.type == "cpu" and query.dtype == keys.view.dtype == values.view.dtype == torch.bfloat16:
        from sparse_kernels.termination import cpu

        implementation = cpu.visited_pages
    return implementation(query, keys, values, block_table, context_lens, pages, scale, rule, sinks, softcap)


def count_visits(visited: torch.Tensor, context_lens: torch.Tensor, page_size: int, block_tokens: int) -> torch.Tensor:
    """What each row of a step adds to the counters of its KV head.

    Args:
        visited: `[num_tokens, num_kv_heads]` integer, pages visited.
        context_lens: `[num_tokens]` integer.
        page_size: tokens per page.
        block_tokens: tokens of a block.

    Returns:
        `[num_tokens, num_kv_heads, 4]` int64: 1 row, blocks visited, tokens read, tokens of the context.
    """
    tokens = visited.long() * page_size
    blocks = (tokens + block_tokens - 1) // block_tokens
    contexts = context_lens.long()[:, None].expand_as(tokens)
    return torch.stack([torch.ones_like(tokens), blocks, tokens + contexts % page_size, contexts], dim=-1)
