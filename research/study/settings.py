"""What is measured: a page score with everything else that a selection depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from sparse_kernels.page_coverage.reference import count_best

from research.study.scores import Newest, PageScore

Stress = Literal["none", "channels", "offset", "centred"]
"""Keys as larger models have them: a few channels of 8 times the size, or an offset that all keys share; or the
opposite, the document's mean key subtracted from all."""


@dataclass(frozen=True)
class Setting:
    """A selection as decode runs it. Without a score: dense attention."""

    score: PageScore | None = None
    page_size: int = 8
    budget_tokens: int = 512
    group: Literal["max", "softmax", "softmax-max"] = "max"
    """How the query heads of a KV head agree: the largest score, or the mean or largest of their softmax over pages."""
    sink_pages: int = 1
    recent_pages: int = 1
    dense_layers: int = 0
    """Leading layers that read everything."""
    mass: float = 1.0
    """Share of the estimated softmax after which no further page is read; needs a softmax over the group."""
    stress: Stress = "none"
    """What is done to keys and queries without an effect on dense attention."""
    coverage: float | None = None
    """Share of the attention weight, as the score estimates it, after which each token and KV head reads no further
    page; the budget is the most, then. Needs a score that is the product with a key, as that of `Parts` is."""
    least_tokens: int = 128
    """Tokens of complete pages that are read at least under a coverage."""

    @property
    def is_dense(self) -> bool:
        """Whether everything is read."""
        return self.score is None

    @property
    def budget_pages(self) -> int:
        """Complete pages read per KV head, at most."""
        return self.budget_tokens // self.page_size

    @property
    def name(self) -> str:
        """Unique among settings, for result files."""
        if self.score is None:
            return "dense" if self.stress == "none" else f"dense/{self.stress}"
        options = {
            f"recent{self.recent_pages}": self.recent_pages != 1 and not isinstance(self.score, Newest),
            self.group: self.group != "max",
            f"dense{self.dense_layers}": self.dense_layers > 0,
            f"mass{self.mass:g}": self.mass < 1,
            f"coverage{self.coverage}": self.coverage is not None,
            self.stress: self.stress != "none",
        }
        parts = [self.score.label, f"p{self.page_size}", f"b{self.budget_tokens}"]
        return "/".join(parts + [text for text, given in options.items() if given])

    def of_group(self, scores: torch.Tensor, complete: torch.Tensor, head_size: int) -> torch.Tensor:
        """One score per page and KV head: `[rows, heads, group, pages]` to `[rows, heads, pages]` bfloat16."""
        if self.group == "max":
            return scores.amax(dim=2).bfloat16()
        exists = torch.arange(scores.shape[-1], device=scores.device) < complete[:, None, None, None]
        shares = (scores / math.sqrt(head_size)).masked_fill(~exists, -torch.inf).softmax(dim=-1)
        shares = shares.mean(dim=2) if self.group == "softmax" else shares.amax(dim=2)
        return shares.bfloat16()

    def cut(self, pages: torch.Tensor, scores: torch.Tensor, complete: torch.Tensor) -> torch.Tensor:
        """Drops the worst of the selected pages once the better ones hold `mass` of the estimated softmax."""
        if self.mass >= 1:
            return pages
        always = (pages < self.sink_pages) | (pages >= complete[:, None, None] - self.recent_pages)
        share = scores.float().gather(-1, pages.clamp(min=0)).masked_fill(pages < 0, 0.0)
        ordered, order = share.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        keep = torch.zeros_like(always).scatter(-1, order, before < self.mass)
        return torch.where(keep | always, pages, -1)

    def count(
        self, products: torch.Tensor, known: torch.Tensor, scores: torch.Tensor, complete: torch.Tensor, head_size: int
    ) -> torch.Tensor:
        """Counts the best pages that reach the coverage, all rows at once, as `sparse_kernels.page_coverage` does.

        Args:
            products: `[rows, heads, group, pages]` float32, of each query with the key that stands for a page.
            known: `[rows, heads, group]` float32, log of what the tokens add to the softmax's denominator that are read
                whatever the query.
            scores: `[rows, heads, pages]` bfloat16, by which pages are ranked.
            complete: `[rows]` int64, pages of each row; later ones do not exist.
            head_size: of the queries.

        Returns:
            `[rows, heads]` int64, those always read included; more than a row has where it has fewer than the least.
        """
        assert self.coverage is not None
        page, lengths = torch.arange(scores.shape[-1], device=scores.device), complete[:, None, None]
        always = (page < self.sink_pages) | (page >= lengths - self.recent_pages)
        logits = products / math.sqrt(head_size) + math.log(self.page_size)
        key = scores.float().masked_fill(always, torch.inf).masked_fill(page >= lengths, -torch.inf)
        count = count_best(logits, known, always, key, self.coverage)
        least = self.least_tokens // self.page_size
        return count.clamp(max=max(self.budget_pages, least)).minimum(complete[:, None]).clamp(min=least)
