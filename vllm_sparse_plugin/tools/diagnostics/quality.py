"""Compares a selection of pages with dense attention."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
    keys: torch.Tensor,
    values: torch.Tensor,
    context_lens: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    scale: float,
) -> Quality:
    """Compares attention over selected pages with dense attention.

    In addition to the selected pages every query reads its incomplete last page. All arithmetic is in float32.

    Args:
        query: `[num_queries, num_kv_heads, group_size, head_size]`, any float dtype.
        keys: `[num_kv_heads, num_tokens, head_size]`, a text from its first token on.
        values: like `keys`; finite.
        context_lens: `[num_queries]` integer, tokens that each query attends to, itself included; at least 1.
        pages: `[num_queries, num_kv_heads, k]` integer, complete pages that are read, -1 for none.
        page_size: tokens per page.
        scale: of the products of queries and keys.
    """
    tokens = keys.shape[1]
    logits = torch.einsum("qhgd,hnd->qhgn", query.float(), keys.float()) * scale
    beyond = torch.arange(tokens, device=keys.device) >= context_lens[:, None, None, None]
    logits = logits.masked_fill(beyond, -torch.inf)
    reading = Reading.of(pages, context_lens, page_size, -(-tokens // page_size))
    chosen, complete = reading.chosen, reading.complete
    weights = logits.softmax(dim=-1)
    mass = torch.nn.functional.pad(weights, (0, -tokens % page_size)).unflatten(-1, (-1, page_size)).sum(-1).mean(2)
    # The oracle takes as many complete pages as were chosen; ties go to the lowest page.
    best = mass.masked_fill(~complete, -1.0).sort(dim=-1, descending=True, stable=True).indices
    oracle = torch.zeros_like(chosen).scatter(2, best, reading.page < chosen.sum(dim=-1, keepdim=True))
    by_token = reading.read.repeat_interleave(page_size, dim=-1)[..., :tokens]
    sparse = logits.masked_fill(~by_token[:, :, None], -torch.inf).softmax(dim=-1)
    sparse_output, dense_output = (torch.einsum("qhgt,htd->qhgd", part, values.float()) for part in (sparse, weights))
    return Quality(
        (mass * reading.read).sum(dim=-1),
        (mass * (oracle | reading.incomplete)).sum(dim=-1),
        (oracle & chosen).sum(dim=-1) / oracle.sum(dim=-1).clamp(min=1),
        torch.nn.functional.cosine_similarity(sparse_output, dense_output, dim=-1).mean(dim=2),
    )
