"""Quest (arXiv 2406.10774) stores the element-wise bounds of a page's keys."""

from __future__ import annotations

import torch

from sparse_kernels.optional_triton import jit, tl
from sparse_kernels.page_statistics.kinds.base import LARGEST_FINITE, StatisticsKind


@jit
def _summarise(keys, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    # Keys that are not finite have no bounds. Such a page is read.
    finite = tl.abs(keys) <= LARGEST_FINITE
    most = tl.max(tl.where(finite, keys, LARGEST_FINITE), axis=0)
    least = tl.min(tl.where(finite, keys, -LARGEST_FINITE), axis=0)
    return most, least


@jit
def _features(query, std_weight):
    return tl.maximum(query, 0.0), tl.minimum(query, 0.0)


@jit
def _middle(vectors, HEAD_SIZE: tl.constexpr):
    return ((vectors[0] + vectors[1]) * 0.5,)


@jit
def _half_diagonal(vectors, spread):
    half = (vectors[0] - vectors[1]) * 0.5
    return tl.sqrt_rn(tl.sum(half * half, axis=1))


class Bounds(StatisticsKind):
    """Element-wise maximum M and minimum m of a page's keys.

        s_p(q) = sum_d max(q_d m_d, q_d M_d) = max(q, 0) . M_p + min(q, 0) . m_p

    No logit of the page exceeds this score. In bf16 the bounds of a bf16 cache are exact. In 8 bits each bound has an
    error of up to one step of its scale.
    """

    name = "bounds"
    vectors = 2
    triton_summarise = _summarise
    triton_features = _features
    triton_summary_keys = _middle
    triton_summary_spread = _half_diagonal

    @staticmethod
    def summarise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `StatisticsKind.summarise`."""
        return torch.stack([keys.amax(dim=-2), keys.amin(dim=-2)], dim=-2), None

    @staticmethod
    def features(query: torch.Tensor, std_weight: float) -> torch.Tensor:
        """See `StatisticsKind.features`: the positive and the negative part of the query."""
        return torch.stack([query.clamp(min=0), query.clamp(max=0)], dim=-2)

    @property
    def summary_keys(self) -> int:
        """See `StatisticsKind.summary_keys`."""
        return 1

    @property
    def summary_has_spread(self) -> bool:
        """See `StatisticsKind.summary_has_spread`."""
        return True

    @staticmethod
    def summary(vectors: torch.Tensor, spread: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `StatisticsKind.summary`: the middle of the box, and half its diagonal."""
        most, least = vectors.unbind(dim=-2)
        return ((most + least) / 2).unsqueeze(-2), ((most - least) / 2).norm(dim=-1)
