"""Attends to selected pages in torch: the specification, and the CPU path for dtypes other than bfloat16."""

from __future__ import annotations

import torch

from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.paging import PagedTensor


def logits_and_values(
    tokens: QueryTokens, cache: KVCache, pages: torch.Tensor, softmax: Softmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits and values of the pages' tokens in order, then of the incomplete page, padded to a whole page.

    Arguments are those of `api.attend_pages`; n is (k + 1) times the page size, and a row is one token and KV head.
    Values are as stored.

    Returns:
        Logits `[rows, group_size, n]`, -inf for tokens that are not attended to, and values `[rows, n, head_size]`, 0
        for these tokens; float32.
    """
    num_tokens, num_kv_heads, group_size, head_size = tokens.query.shape
    page_size, per_block = cache.page_size, cache.keys.pages_per_block
    incomplete = tokens.num_pages(page_size)
    tail_lens = tokens.context_lens % page_size
    tail = torch.where(tail_lens > 0, incomplete, -1)
    pages = torch.cat([pages, tail[:, None, None].expand(-1, num_kv_heads, 1)], dim=-1)

    present = pages >= 0
    logical = pages.clamp(min=0)
    blocks = tokens.block_table.gather(1, (logical // per_block).flatten(1)).view_as(pages)
    heads = torch.arange(num_kv_heads, device=pages.device)[:, None]
    within = logical % per_block

    valid = present.unsqueeze(-1).repeat(1, 1, 1, page_size)
    valid[:, :, -1] &= torch.arange(page_size, device=pages.device) < tail_lens[:, None, None]
    valid = valid.flatten(2)

    def gathered(paged: PagedTensor) -> torch.Tensor:
        return paged.gather(blocks, heads, within).flatten(0, 1).flatten(1, 2).float()

    rows = num_tokens * num_kv_heads
    mask = valid.view(rows, 1, -1)
    query = tokens.query.reshape(rows, group_size, head_size).float()
    logits = torch.bmm(query, gathered(cache.keys).transpose(1, 2)) * cache.scaled_by_keys(softmax.scale)
    if softmax.softcap:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    # Memory beyond the context is stale and may hold NaN. A weight of 0 would not hide NaN.
    return logits.masked_fill(~mask, -torch.inf), gathered(cache.values).masked_fill_(~mask.transpose(1, 2), 0.0)


def attend_pages(tokens: QueryTokens, cache: KVCache, pages: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """See `api.attend_pages`."""
    num_tokens, num_kv_heads, group_size, _ = tokens.query.shape
    logits, values = logits_and_values(tokens, cache, pages, softmax)
    if softmax.sink_logits is not None:
        sink = softmax.sink_logits.float().view(num_kv_heads, group_size, 1).repeat(num_tokens, 1, 1)
        logits = torch.cat([logits, sink], dim=-1)
    weights = logits.softmax(dim=-1)[..., : values.shape[1]]
    # A row that reads nothing has no weights.
    weights = weights.masked_fill((logits == -torch.inf).all(dim=-1, keepdim=True), 0.0)
    output = torch.bmm(weights, values)
    if cache.value_scale is not None:
        output = output * cache.value_scale
    return output.view(num_tokens, num_kv_heads * group_size, cache.values.head_size).to(tokens.query.dtype)
