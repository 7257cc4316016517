"""Measures what a selection of pages gets of dense attention, in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sparse_kernels.batch import Softmax


class Quality(NamedTuple):
    """How a selection compares with dense attention, of each query token and KV head; means over the group."""

    mass: torch.Tensor
    """`[num_queries, num_kv_heads]` float32: share of the attention weight of all tokens that is on tokens read."""
    oracle_mass: torch.Tensor
    """The same of the oracle, which reads as many complete pages, those of the largest true weight."""
    recall: torch.Tensor
    """Share of the oracle's pages that are read."""
    cosine: torch.Tensor
    """Cosine of the outputs of attention over what is read and over everything."""


def measure(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context_lens: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    softmax: Softmax,
) -> Quality:
    """Compares attention over selected pages with dense attention.

    Besides the selected pages every query reads its incomplete last one. All arithmetic is in float32.

    Args:
        query: `[num_queries, num_kv_heads, group_size, head_size]`, any float dtype.
        keys: `[num_kv_heads, num_tokens, head_size]`, one request's, from its first token on.
        values: like `keys`.
        context_lens: `[num_queries]` integer, tokens that each query attends to, itself included; at least 1.
        pages: `[num_queries, num_kv_heads, k]` integer, complete pages that are read, -1 for none.
        page_size: tokens per page.
        softmax: how logits become weights; sink logits take part in the outputs, not in the shares.
    """
    heads, tokens = keys.shape[:2]
    logits = torch.einsum("qhgd,hnd->qhgn", query.float(), keys.float()) * softmax.scale
    if softmax.softcap:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    token = torch.arange(tokens, device=logits.device)
    logits = logits.masked_fill(token >= context_lens[:, None, None, None], -torch.inf)
    sink = None if softmax.sink_logits is None else softmax.sink_logits.float().view(heads, -1, 1)

    weights = _softmax(logits, sink)
    by_page = torch.nn.functional.pad(weights, (0, -tokens % page_size)).unflatten(-1, (-1, page_size)).sum(dim=-1)
    mass = (by_page / by_page.sum(dim=-1, keepdim=True)).mean(dim=2)

    count = mass.shape[-1]
    page = torch.arange(count, device=logits.device)
    complete_pages = (context_lens // page_size)[:, None, None]
    complete = page < complete_pages
    chosen = torch.zeros(*mass.shape[:2], count + 1, dtype=torch.bool, device=logits.device)
    chosen = chosen.scatter(2, torch.where(pages < 0, count, pages).long(), True)[..., :count] & complete
    read = chosen | (page == complete_pages)
    # The oracle takes as many complete pages as were chosen; of equal ones it takes the lower.
    rank = mass.masked_fill(~complete, -1.0).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    oracle = rank < chosen.sum(dim=-1, keepdim=True)

    sparse = logits.masked_fill(~read.repeat_interleave(page_size, dim=-1)[:, :, None, :tokens], -torch.inf)
    sparse_output, dense_output = (
        torch.einsum("qhgn,hnd->qhgd", w, values.float()) for w in (_softmax(sparse, sink), weights)
    )
    return Quality(
        (mass * read).sum(dim=-1),
        (mass * (oracle | (page == complete_pages))).sum(dim=-1),
        (oracle & chosen).sum(dim=-1) / oracle.sum(dim=-1).clamp(min=1),
        torch.nn.functional.cosine_similarity(sparse_output, dense_output, dim=-1).mean(dim=2),
    )


def _softmax(logits: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Takes the softmax over the last dimension, with a learned sink logit in the denominator."""
    if sink is None:
        return logits.softmax(dim=-1)
    return torch.cat([logits, sink.expand(*logits.shape[:-1], 1)], dim=-1).softmax(dim=-1)[..., :-1]
