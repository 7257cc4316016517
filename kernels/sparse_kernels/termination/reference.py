"""Termination in torch: the specification."""

from __future__ import annotations

import torch

from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_attention.reference import logits_and_values
from sparse_kernels.termination.rule import StopRule, probe_elements


def partial_outputs(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    block_tokens: int,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """o(t) for every block t: `[num_tokens, num_kv_heads, blocks, group_size, head_size]`, sums of blocks in float64.

    Arguments are those of `api.visited_pages`. Behind the last block of a row o(t) stays as it is.
    """
    num_tokens, num_kv_heads, group_size, _ = query.shape
    pages = torch.nn.functional.pad(pages, (0, -pages.shape[-1] % (block_tokens // keys.page_size)), value=-1)
    logits, attended = logits_and_values(query, keys, values, block_table, context_lens, pages, scale, softcap)
    largest = logits.amax(dim=-1, keepdim=True)
    sink = torch.full_like(largest, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, group_size, 1).repeat(num_tokens, 1, 1)
        largest = torch.maximum(largest, sink)
    weights, sink = (logits - largest).exp(), (sink - largest).exp()
    # The incomplete page is the last of these; it and a learned sink are part of every o(t).
    whole = logits.shape[-1] - keys.page_size
    by_block = weights[..., :whole].unflatten(-1, (-1, block_tokens))
    weighted = torch.einsum("rgbn,rbnd->rbgd", by_block, attended[:, :whole].unflatten(1, (-1, block_tokens)))
    weighted = weighted.double().cumsum(dim=1) + (weights[..., whole:] @ attended[:, whole:])[:, None]
    total = by_block.sum(dim=-1).double().cumsum(dim=-1) + weights[..., whole:].sum(dim=-1, keepdim=True) + sink
    outputs: torch.Tensor = weighted / total.transpose(1, 2)[..., None]
    return outputs.view(num_tokens, num_kv_heads, *outputs.shape[1:])


def stop_blocks(partial: torch.Tensor, rule: StopRule, probe: list[int], least_blocks: int = 0) -> torch.Tensor:
    """The block after which each row stops, or one more than there are.

    Args:
        partial: `[num_tokens, num_kv_heads, blocks, group_size, head_size]`, see `partial_outputs`.
        rule: when to stop.
        probe: elements of an output that are watched.
        least_blocks: blocks that are visited whatever the outputs.

    Returns:
        `[num_tokens, num_kv_heads]` int64, counted from 1.
    """
    blocks = partial.shape[2]
    x = partial[..., probe]
    stop = torch.full(partial.shape[:2], blocks + 1, device=partial.device)
    if rule.patience == 0:
        return stop
    consecutive = torch.zeros_like(stop)
    for t in range(2, blocks + 1):
        now, before = x[:, :, t - 1], x[:, :, t - 2]
        scale = (now - before).norm(dim=-1)
        direction = 1 - (now * before).sum(dim=-1) / (now.norm(dim=-1) * before.norm(dim=-1))
        stable = ((scale < rule.scale_tolerance) & (direction < rule.direction_tolerance)).all(dim=-1)
        consecutive = torch.where(stable, consecutive + 1, 0)
        stopping = (consecutive >= rule.patience) & (stop > blocks)
        if t >= least_blocks:
            stop = torch.where(stopping, t, stop)
    return stop


def visited_pages(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    rule: StopRule,
    sinks: torch.Tensor | None,
    softcap: float,
) -> torch.Tensor:
    """See `api.visited_pages`."""
    partial = partial_outputs(
        query, keys, values, block_table, context_lens, pages, scale, rule.block_tokens, sinks, softcap
    )
    per_block = rule.block_tokens // keys.page_size
    stop = stop_blocks(partial, rule, probe_elements(values.head_size), -(-rule.least_pages // per_block))
    return torch.minimum(stop * per_block, (pages >= 0).sum(dim=-1))
