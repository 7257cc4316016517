"""Compared page statistics: their scores of a layer's pages, and their estimates of the pages' weight.

A new kind is a subclass of `Statistics` with an entry in `STATISTICS`. It needs no kernel: it takes the keys of a layer
and returns scores.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.page_score.reference import score_pages
from sparse_kernels.row_attention import masked_logits

from vllm_sparse_plugin.policies import InfLLMSelection, MeanSelection, QuestSelection, UniqueSelection
from vllm_sparse_plugin.policies.scored import ScoredSelection
from vllm_sparse_plugin.tools.diagnostics.forward import LayerInputs, PagedLayer


@dataclass(frozen=True)
class Pages:
    """The pages of one layer, with their true attention weights."""

    layer: LayerInputs
    size: int
    """Tokens of a page."""
    log_weights: torch.Tensor
    """`[num_queries, num_kv_heads, group_size, num_pages]` float32: log of each page's part of the softmax denominator,
    the incomplete page included; -inf beyond the context."""

    @classmethod
    def of(cls, layer: LayerInputs, size: int) -> Pages:
        """Return the pages of a layer."""
        logits = masked_logits(layer.query, [layer.keys], layer.context_lens, Softmax(layer.scale))
        padded = torch.nn.functional.pad(logits, (0, -logits.shape[-1] % size), value=-torch.inf)
        return cls(layer, size, padded.unflatten(-1, (-1, size)).logsumexp(dim=-1))

    @property
    def complete(self) -> torch.Tensor:
        """`[num_queries]` int64, number of complete pages of each context."""
        return self.layer.context_lens // self.size

    @property
    def count(self) -> int:
        """Number of complete pages of the longest context."""
        return int(self.complete.max())


@dataclass(frozen=True)
class Scores:
    """Scores of the complete pages of a layer."""

    scores: torch.Tensor
    """`[num_queries, num_kv_heads, num_pages]` bfloat16, ranks the pages."""
    record_bytes: int
    """Bytes read to score a page, per KV head."""
    log_weights: torch.Tensor | None = None
    """Estimate of `Pages.log_weights` without the incomplete page; None without an estimate."""


class Statistics(ABC):
    """A way to store and score pages."""

    @abstractmethod
    def score(self, pages: Pages) -> Scores:
        """Score all complete pages."""


@dataclass(frozen=True)
class Stored(Statistics):
    """Statistics of a policy, from the bytes that a server stores."""

    policy: Callable[[int], ScoredSelection]
    """Return the policy for a page size."""

    def score(self, pages: Pages) -> Scores:
        """Score all complete pages like a server."""
        policy, layer = self.policy(pages.size), pages.layer
        paged = PagedLayer(layer, policy)
        layout = policy.statistics_layout(layer.keys.shape[-1], layer.keys.dtype.itemsize)
        assert paged.statistics is not None
        scores = score_pages(
            layer.query, paged.statistics, paged.block_table, pages.complete, policy.std_weight, policy.refined_share
        )
        vectors, spread = paged.statistics.summaries(paged.block_table[0])
        vectors = vectors[:, : pages.count]
        products = torch.einsum("qhgd,hpvd->qhgpv", layer.query.float(), vectors) * layer.scale
        estimate: torch.Tensor | None = None
        if layout.kind.codes is not None and not layout.kind.is_leveled:
            # As in `page_coverage`: all tokens of a page count like its best vector.
            estimate = products.amax(dim=-1)
        elif spread is not None and isinstance(policy, UniqueSelection):
            # Second order: the deviation is equal in all directions.
            deviation = layer.scale * layer.query.float().norm(dim=-1, keepdim=True) * spread[:, None, : pages.count]
            estimate = products.squeeze(-1) + deviation.square() / (2 * layer.query.shape[-1])
        return Scores(scores, layout.record_bytes, None if estimate is None else estimate + math.log(pages.size))


@dataclass(frozen=True)
class ByShare(Statistics):
    """Statistics whose pages are ranked by the share that the heads of a group expect, in the mean, and not by the
    largest score of the group."""

    stored: Statistics
    """With an estimate of the weights."""

    def score(self, pages: Pages) -> Scores:
        """Rank pages by their expected share, mean over the group."""
        scored = self.stored.score(pages)
        assert scored.log_weights is not None
        missing = torch.arange(pages.count, device=pages.complete.device) >= pages.complete[:, None, None, None]
        shares = scored.log_weights.masked_fill(missing, -torch.inf).softmax(dim=-1)
        return Scores(shares.mean(dim=2).bfloat16(), scored.record_bytes)


class Oracle(Statistics):
    """The true weight of every page: an upper bound for all statistics."""

    def score(self, pages: Pages) -> Scores:
        """Rank pages by their weight, mean over the group."""
        weights = pages.log_weights[..., : pages.count]
        shares = weights - pages.log_weights.logsumexp(dim=-1, keepdim=True)
        ranked = shares.exp().mean(dim=2).bfloat16()
        keys = pages.layer.keys
        return Scores(ranked, pages.size * keys.shape[-1] * keys.dtype.itemsize, weights)


class Newest(Statistics):
    """The newest pages for any query: a lower bound."""

    def score(self, pages: Pages) -> Scores:
        """Rank pages by age."""
        # Consecutive bit patterns are ascending numbers. Other bfloat16 values could not distinguish so many pages.
        ages = torch.arange(128, 128 + pages.count, dtype=torch.int16, device=pages.complete.device)
        shape = *pages.log_weights.shape[:2], pages.count
        return Scores(ages.view(torch.bfloat16).expand(shape), 0)


def _deviation(weight: float) -> Stored:
    """Return mean and deviation with a lambda."""
    return Stored(lambda size: UniqueSelection(statistics="bf16", page_size=size, **{"lambda": weight}))  # type: ignore[arg-type]


_QUARTERS = Stored(lambda size: UniqueSelection(statistics="quarters", page_size=size))  # type: ignore[arg-type]
STATISTICS: dict[str, Statistics] = {
    "quarters": _QUARTERS,
    "quarters-by-share": ByShare(_QUARTERS),
    "leveled": Stored(lambda size: UniqueSelection(statistics="leveled_quarters", page_size=size)),  # type: ignore[arg-type]
    "sketch": Stored(lambda size: UniqueSelection(statistics="sketch", page_size=size)),  # type: ignore[arg-type]
    "unique-int8": Stored(lambda size: UniqueSelection(statistics="int8", page_size=size)),  # type: ignore[arg-type]
    "unique-bf16": Stored(lambda size: UniqueSelection(statistics="bf16", page_size=size)),  # type: ignore[arg-type]
    **{f"unique-bf16-{weight}": _deviation(weight) for weight in (0.25, 0.5, 1.5, 2.0)},
    "mean": Stored(lambda size: MeanSelection(page_size=size)),  # type: ignore[arg-type]
    "quest": Stored(lambda size: QuestSelection(page_size=size)),  # type: ignore[arg-type]
    "infllm": Stored(lambda size: InfLLMSelection(page_size=size)),  # type: ignore[arg-type]
    "newest": Newest(),
    "oracle": Oracle(),
}
"""By name in result files."""
