"""Measures what a selection of pages gets of dense attention, in torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from sparse_kernels.batch import PageSelection, Softmax
from sparse_kernels.page_coverage import page_logits


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
    estimated_mass: torch.Tensor | None = None
    """`mass` as the page statistics estimate it; None where they do not."""


class Context(NamedTuple):
    """What queries attend to: one request, from its first token on, in consecutive pieces that are asked for once."""

    keys: Iterable[torch.Tensor]
    """`[num_kv_heads, num_tokens, head_size]` each."""
    values: Iterable[torch.Tensor]
    """Like `keys`; finite."""
    summaries: Iterable[torch.Tensor] | None = None
    """`[num_kv_heads, num_pages, summary_keys, head_size]` float32 each, see `PageStatistics.summaries`: of every
    complete page, and maybe of more; None for statistics whose vectors are no keys."""


def measure(
    query: torch.Tensor,
    context: Context,
    context_lens: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    softmax: Softmax,
    selection: PageSelection | None = None,
) -> Quality:
    """Compares attention over selected pages with dense attention. It does not wait for a device.

    Besides the selected pages every query reads its incomplete last one. All arithmetic is in float32. The estimated
    mass is that by which a coverage counts pages, see `count_pages`.

    Args:
        query: `[num_queries, num_kv_heads, group_size, head_size]`, any float dtype.
        context: keys and values, at least as many as each query attends to.
        context_lens: `[num_queries]` integer, tokens that each query attends to, itself included; at least 1.
        pages: `[num_queries, num_kv_heads, k]` integer, complete pages that are read, -1 for none.
        page_size: tokens per page.
        softmax: how logits become weights; sink logits take part in the outputs, not in the shares.
        selection: which pages are read whatever the query, whose weight the estimate knows; not without summaries.
    """
    logits = torch.cat([torch.einsum("qhgd,hnd->qhgn", query.float(), keys.float()) for keys in context.keys], dim=-1)
    logits = logits * softmax.scale
    if softmax.softcap:
        logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
    heads, tokens = query.shape[1], logits.shape[-1]
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

    sparse = logits.masked_fill(~_by_token(read, page_size, tokens)[:, :, None], -torch.inf)
    sparse_output, dense_output = _outputs(torch.stack([_softmax(sparse, sink), weights]), context.values)
    estimated_mass = None
    if context.summaries is not None and selection is not None:
        # One query head after the other: to the estimate they all belong to one group.
        rows = query.movedim(1, 0).flatten(1, 2)
        estimates = [page_logits(rows, piece, page_size, softmax) for piece in context.summaries]
        by_query = torch.cat(estimates, dim=-1)[..., :count].unflatten(1, query.shape[0:3:2]).movedim(0, 1)
        recent = (page >= complete_pages - selection.recent_pages) & (page <= complete_pages)
        known = (page < selection.sink_pages) | recent
        estimated_mass = _estimated_mass(logits, by_query, known, complete, chosen, page_size)
    return Quality(
        (mass * read).sum(dim=-1),
        (mass * (oracle | (page == complete_pages))).sum(dim=-1),
        (oracle & chosen).sum(dim=-1) / oracle.sum(dim=-1).clamp(min=1),
        torch.nn.functional.cosine_similarity(sparse_output, dense_output, dim=-1).mean(dim=2),
        estimated_mass,
    )


def _by_token(pages: torch.Tensor, page_size: int, tokens: int) -> torch.Tensor:
    """Returns of each token what the last dimension says of its page."""
    return pages.repeat_interleave(page_size, dim=-1)[..., :tokens]


def _outputs(weights: torch.Tensor, values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the outputs `[n, num_queries, num_kv_heads, group_size, head_size]` of n sets of weights."""
    outputs, start = torch.zeros((), device=weights.device), 0
    for piece in values:
        end = start + piece.shape[1]
        outputs = outputs + torch.einsum("nqhgt,htd->nqhgd", weights[..., start:end], piece.float())
        start = end
    return outputs


def _estimated_mass(
    logits: torch.Tensor,
    estimates: torch.Tensor,
    known: torch.Tensor,
    complete: torch.Tensor,
    chosen: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """Returns the estimated share of what is read.

        m_p = e^(l_p)        Z = sum over tokens i of known pages of e^(l_i) + sum over other pages p of m_p
        (Z - sum over unread p of m_p) / Z, the mean over the heads of the group

    Args:
        logits: l_i, `[num_queries, num_kv_heads, group_size, num_tokens]` float32, -inf beyond a context.
        estimates: l_p, `[num_queries, num_kv_heads, group_size, num_pages]` float32, see `page_logits`.
        known: `[num_queries, 1, num_pages or more]` bool, pages that are read whatever the query; the incomplete one.
        complete: `[num_queries, 1, num_pages or more]` bool.
        chosen: `[num_queries, num_kv_heads, num_pages or more]` bool, complete pages that are read.
        page_size: tokens per page.

    Returns:
        `[num_queries, num_kv_heads]` float32.
    """
    count = estimates.shape[-1]
    estimated = (complete & ~known)[..., :count]
    estimates = estimates.masked_fill(~estimated[:, :, None], -torch.inf)
    of_known = logits.masked_fill(~_by_token(known, page_size, logits.shape[-1])[:, :, None], -torch.inf)
    total = torch.logaddexp(of_known.logsumexp(dim=-1), estimates.logsumexp(dim=-1))
    shares = (estimates - total[..., None]).exp()
    return 1 - (shares * ~chosen[:, :, None, :count]).sum(dim=-1).mean(dim=2)


def _softmax(logits: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Takes the softmax over the last dimension, with a learned sink logit in the denominator."""
    if sink is None:
        return logits.softmax(dim=-1)
    return torch.cat([logits, sink.expand(*logits.shape[:-1], 1)], dim=-1).softmax(dim=-1)[..., :-1]
