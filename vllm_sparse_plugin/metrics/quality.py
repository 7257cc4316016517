"""Compares a selection of pages with dense attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from sparse_kernels.batch import PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_coverage import page_logits, row_page_logits
from sparse_kernels.row_attention import RowAttention, attend, attend_row, masked_logits


class Quality(NamedTuple):
    """Comparison of a selection with dense attention, per query token and KV head; means over the group."""

    mass: torch.Tensor
    """`[num_queries, num_kv_heads]` float32: share of the attention weight that is on the tokens read."""
    oracle_mass: torch.Tensor
    """The same for the oracle, which reads as many complete pages: those of the largest true weight."""
    recall: torch.Tensor
    """Share of the oracle's pages that are read."""
    cosine: torch.Tensor
    """Cosine of the outputs of sparse and dense attention."""
    estimated_mass: torch.Tensor | None = None
    """`mass` as the page statistics estimate it; None for statistics without an estimate."""


class Context(NamedTuple):
    """The context of queries: one request from its first token on, in consecutive pieces that are iterated once."""

    keys: Iterable[torch.Tensor]
    """Pieces of `[num_kv_heads, num_tokens, head_size]`."""
    values: Iterable[torch.Tensor]
    """Like `keys`; finite."""
    summaries: Iterable[torch.Tensor] | None = None
    """Pieces of `[num_kv_heads, num_pages, vectors, head_size]` float32, see `PageStatistics.keys`: of every
    complete page, possibly of more; None for statistics whose vectors are not keys."""


class Reading(NamedTuple):
    """The pages of their contexts that query tokens read."""

    page: torch.Tensor
    """`[num_pages]`, page numbers."""
    complete_pages: torch.Tensor
    """`[num_queries, 1, 1]`, number of complete pages of each context."""
    chosen: torch.Tensor
    """`[num_queries, num_kv_heads, num_pages]` bool, complete pages that are read."""

    @classmethod
    def of(cls, pages: torch.Tensor, context_lens: torch.Tensor, page_size: int, num_pages: int) -> Reading:
        """Takes pages and contexts of `measure`, and at least the number of pages of the longest context."""
        page = torch.arange(num_pages, device=pages.device)
        complete_pages = (context_lens // page_size)[:, None, None]
        # Entries of -1 go to an extra place behind all pages.
        chosen = torch.zeros(*pages.shape[:2], num_pages + 1, dtype=torch.bool, device=pages.device)
        chosen = chosen.scatter(2, torch.where(pages < 0, num_pages, pages).long(), True)[..., :num_pages]
        return cls(page, complete_pages, chosen & (page < complete_pages))

    @property
    def complete(self) -> torch.Tensor:
        """`[num_queries, 1, num_pages]` bool."""
        return self.page < self.complete_pages

    @property
    def incomplete(self) -> torch.Tensor:
        """`[num_queries, 1, num_pages]` bool, the incomplete page."""
        return self.page == self.complete_pages

    @property
    def read(self) -> torch.Tensor:
        """`[num_queries, num_kv_heads, num_pages]` bool."""
        return self.chosen | self.incomplete


def measure(
    query: torch.Tensor,
    context: Context,
    context_lens: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    softmax: Softmax,
    selection: PageSelection | None = None,
) -> Quality:
    """Compares attention over selected pages with dense attention, without waiting for the device.

    In addition to the selected pages every query reads its incomplete last page. All arithmetic is in float32. The
    estimated mass is the one by which a coverage counts pages, see `count_pages`.

    Args:
        query: `[num_queries, num_kv_heads, group_size, head_size]`, any float dtype.
        context: keys and values, at least as many as each query attends to.
        context_lens: `[num_queries]` integer, tokens that each query attends to, itself included; at least 1.
        pages: `[num_queries, num_kv_heads, k]` integer, complete pages that are read, -1 for none.
        page_size: tokens per page.
        softmax: how logits become weights. Sink logits are part of the outputs, not of the shares.
        selection: the pages that are always read; their weight is exact in the estimate. Required with summaries.
    """
    logits = masked_logits(query, context.keys, context_lens, softmax)
    reading = Reading.of(pages, context_lens, page_size, -(-logits.shape[-1] // page_size))
    attention = attend(logits, context.values, reading.read, page_size, softmax)
    if context.summaries is None or selection is None:
        return _compare(attention, reading)
    # Query heads are handled one after the other. The estimate treats them as one group.
    rows = query.movedim(1, 0).flatten(1, 2)
    estimates = torch.cat([page_logits(rows, piece, page_size, softmax) for piece in context.summaries], dim=-1)
    return _compare(attention, reading, estimates.unflatten(1, query.shape[0:3:2]).movedim(0, 1), selection)


def measure_cached(
    token: QueryTokens, longest: int, cache: KVCache, pages: torch.Tensor, softmax: Softmax, selection: PageSelection
) -> Quality:
    """Compares the pages that one query token reads with dense attention, like `measure`. On a GPU a 16-bit cache is
    read in place, in a few launches; other caches are copied in pieces. Neither waits for the device.

    Args:
        token: the query token. Its query has the dtype of the cache, or is float32 with the scale of the keys.
        longest: upper bound on its context, known to the host.
        cache: what it attends to.
        pages: `[1, num_kv_heads, k]` integer, the complete pages it reads, -1 for none.
        softmax: how logits become weights.
        selection: the pages that are always read.
    """
    pages_per_block = cache.keys.pages_per_block
    num_pages = -(-longest // (pages_per_block * cache.page_size)) * pages_per_block
    reading = Reading.of(pages, token.context_lens, cache.page_size, num_pages)
    attention = attend_row(token, cache, reading.read, softmax)
    estimates = row_page_logits(token, cache, num_pages, softmax)
    return _compare(attention, reading, None if estimates is None else estimates[None], selection)


def _compare(
    attention: RowAttention,
    reading: Reading,
    estimates: torch.Tensor | None = None,
    selection: PageSelection | None = None,
) -> Quality:
    """Compares reading some pages with reading all.

    Args:
        attention: outputs and page sums of both.
        reading: the pages read.
        estimates: `[num_queries, num_kv_heads, group_size, num_pages or fewer]` float32, see `page_logits`; undefined
            beyond the complete pages. None without estimates.
        selection: the pages that are always read; required with estimates.
    """
    mass = attention.page_sums.softmax(dim=-1).mean(dim=2)
    chosen, complete = reading.chosen, reading.complete
    # The oracle takes as many complete pages as were chosen; ties go to the lowest page.
    best = mass.masked_fill(~complete, -1.0).sort(dim=-1, descending=True, stable=True).indices
    oracle = torch.zeros_like(chosen).scatter(2, best, reading.page < chosen.sum(dim=-1, keepdim=True))
    estimated_mass = None
    if estimates is not None and selection is not None:
        estimated_mass = _estimated_mass(attention.page_sums, estimates, reading, selection)
    return Quality(
        (mass * reading.read).sum(dim=-1),
        (mass * (oracle | reading.incomplete)).sum(dim=-1),
        (oracle & chosen).sum(dim=-1) / oracle.sum(dim=-1).clamp(min=1),
        torch.nn.functional.cosine_similarity(attention.sparse, attention.dense, dim=-1).mean(dim=2),
        estimated_mass,
    )


def _estimated_mass(
    page_sums: torch.Tensor, estimates: torch.Tensor, reading: Reading, selection: PageSelection
) -> torch.Tensor:
    """Returns the estimated share of attention weight on the pages read.

        m_p = e^(l_p)        Z = sum over tokens i of known pages of e^(l_i) + sum over other pages p of m_p
        (Z - sum over unread p of m_p) / Z, the mean over the heads of the group

    Known pages are the always-read pages and the incomplete page.

    Args:
        page_sums: log of the sums of e^(l_i), see `RowAttention`.
        estimates: l_p, see `_compare`.
        reading: the pages read.
        selection: the pages that are always read.

    Returns:
        `[num_queries, num_kv_heads]` float32.
    """
    page, complete_pages = reading.page, reading.complete_pages
    recent = (page >= complete_pages - selection.recent_pages) & (page <= complete_pages)
    known = (page < selection.sink_pages) | recent
    count = min(estimates.shape[-1], len(page))
    estimated = (reading.complete & ~known)[..., :count]
    estimates = estimates[..., :count].masked_fill(~estimated[:, :, None], -torch.inf)
    of_known = page_sums.masked_fill(~known[:, :, None], -torch.inf)
    total = torch.logaddexp(of_known.logsumexp(dim=-1), estimates.logsumexp(dim=-1))
    shares = (estimates - total[..., None]).exp()
    return 1 - (shares * ~reading.chosen[:, :, None, :count]).sum(dim=-1).mean(dim=2)
