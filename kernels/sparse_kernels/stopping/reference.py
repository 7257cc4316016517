"""Finds the stop in torch: the specification."""

from __future__ import annotations

import torch

from sparse_kernels.batch import QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.rules import StopRule, probe_elements
from sparse_kernels.sparse_attention.reference import logits_and_values


def partial_outputs(
    tokens: QueryTokens, cache: KVCache, pages: torch.Tensor, softmax: Softmax, block_tokens: int
) -> torch.Tensor:
    """Returns o(t) after every test interval t: `[num_tokens, num_kv_heads, blocks, group_size, head_size]`.

    Intervals are summed in float64. Arguments are those of `api.pages_until_stable`. After the last interval of a row
    o(t) is constant.
    """
    num_tokens, num_kv_heads, group_size, _ = tokens.query.shape
    pages = torch.nn.functional.pad(pages, (0, -pages.shape[-1] % (block_tokens // cache.page_size)), value=-1)
    logits, attended = logits_and_values(tokens, cache, pages, softmax)
    largest = logits.amax(dim=-1, keepdim=True)
    sink = torch.full_like(largest, -torch.inf)
    if softmax.sink_logits is not None:
        sink = softmax.sink_logits.float().view(num_kv_heads, group_size, 1).repeat(num_tokens, 1, 1)
        largest = torch.maximum(largest, sink)
    weights, sink = (logits - largest).exp(), (sink - largest).exp()
    # The incomplete page is the last one. It and a learned sink are part of every o(t).
    complete_tokens = logits.shape[-1] - cache.page_size
    by_block = weights[..., :complete_tokens].unflatten(-1, (-1, block_tokens))
    weighted = torch.einsum("rgbn,rbnd->rbgd", by_block, attended[:, :complete_tokens].unflatten(1, (-1, block_tokens)))
    weighted = (
        weighted.double().cumsum(dim=1) + (weights[..., complete_tokens:] @ attended[:, complete_tokens:])[:, None]
    )
    total = (
        by_block.sum(dim=-1).double().cumsum(dim=-1) + weights[..., complete_tokens:].sum(dim=-1, keepdim=True) + sink
    )
    outputs: torch.Tensor = weighted / total.transpose(1, 2)[..., None]
    return outputs.view(num_tokens, num_kv_heads, *outputs.shape[1:])


def stop_blocks(partial: torch.Tensor, rule: StopRule, probe: list[int], least_blocks: int = 0) -> torch.Tensor:
    """Returns the test interval after which each row stops, or the number of intervals plus one.

    Args:
        partial: `[num_tokens, num_kv_heads, blocks, group_size, head_size]`, see `partial_outputs`.
        rule: when to stop.
        probe: elements of an output that the test compares.
        least_blocks: intervals that are always read.

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


def pages_until_stable(
    tokens: QueryTokens, cache: KVCache, pages: torch.Tensor, softmax: Softmax, rule: StopRule
) -> torch.Tensor:
    """See `api.pages_until_stable`."""
    partial = partial_outputs(tokens, cache, pages, softmax, rule.block_tokens)
    if cache.value_scale is not None:
        # Tolerances apply to scaled values.
        partial = partial * float(cache.value_scale)
    per_block = rule.block_tokens // cache.page_size
    stop = stop_blocks(partial, rule, probe_elements(cache.values.head_size), -(-rule.least_pages // per_block))
    return torch.minimum(stop * per_block, (pages >= 0).sum(dim=-1))
