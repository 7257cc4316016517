"""Attention over selected pages in torch: the specification, and what runs on CPU."""

from __future__ import annotations

import torch

from sparse_kernels.paging import PagedTensor


def logits_and_values(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the tokens of the pages in their order and then of the incomplete page, which takes the room of a whole one.

    Arguments are those of `api.attend_pages`; n is (k + 1) times the page size and a row is a token and KV head.

    Returns:
        Logits `[rows, group_size, n]`, -inf for what is not attended to, and values `[rows, n, head_size]`, 0 for it;
        float32.
    """
    num_tokens, num_kv_heads, group_size, head_size = query.shape
    page_size = keys.page_size
    incomplete = context_lens // page_size
    tail_lens = context_lens % page_size
    tail = torch.where(tail_lens > 0, incomplete, -1)
    pages = torch.cat([pages, tail[:, None, None].expand(-1, num_kv_heads, 1)], dim=-1)

    present = pages >= 0
    logical = pages.clamp(min=0)
    blocks = block_table.gather(1, (logical // keys.pages_per_block).flatten(1)).view_as(pages)
    heads = torch.arange(num_kv_heads, device=query.device)[:, None]
    within = logical % keys.pages_per_block

    valid = present.unsqueeze(-1).repeat(1, 1, 1, page_size)
    valid[:, :, -1] &= torch.arange(page_size, device=query.device) < tail_lens[:, None, None]
    valid = valid.flatten(2)

    def tokens(paged: PagedTensor) -> torch.Tensor:
        return paged.gather(blocks, heads, within).flatten(0, 1).flatten(1, 2).float()

    rows = num_tokens * num_kv_heads
    mask = valid.view(rows, 1, -1)
    logits = torch.bmm(query.reshape(rows, group_size, head_size).float(), tokens(keys).transpose(1, 2)) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    # What lies beyond the context is stale memory and may be NaN, which a weight of 0 would not hide.
    return logits.masked_fill(~mask, -torch.inf), tokens(values).masked_fill_(~mask.transpose(1, 2), 0.0)


def attend_pages(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """See `api.attend_pages`."""
    num_tokens, num_kv_heads, group_size, _ = query.shape
    logits, attended = logits_and_values(query, keys, values, block_table, context_lens, pages, scale, softcap)
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, group_size, 1).repeat(num_tokens, 1, 1)
        logits = torch.cat([logits, sink], dim=-1)
    weights = logits.softmax(dim=-1)[..., : attended.shape[1]]
    output = torch.bmm(weights, attended)
    return output.view(num_tokens, num_kv_heads * group_size, values.head_size).to(query.dtype)
