"""UNIQUE (arXiv 2605.27740) stores the mean key and the spread of the keys around it."""

from __future__ import annotations

import math

import torch

from sparse_kernels.optional_triton import jit, tl
from sparse_kernels.page_statistics.kinds.base import LARGEST_FINITE, StatisticsKind, finite_or


@jit
def _summarise(keys, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    mean = tl.sum(keys, axis=0) / PAGE_SIZE
    deviation = keys - mean[None, :]
    variance = tl.sum(deviation * deviation, axis=0) / PAGE_SIZE
    spread = tl.sqrt_rn(tl.sum(tl.reshape(variance, (HEADS, DIMS)), axis=1))
    # A page whose statistics are not finite has the largest spread, so it is read.
    return finite_or(mean, 0.0), finite_or(spread, LARGEST_FINITE)


class MeanAndSpread(StatisticsKind):
    """Mean and standard deviation of a page's keys (Eq. 1-3).

        mu_p = (1/B) sum_i k_i        sigma_p = || std_i(k_i) ||_2        s_p(q) = q . mu_p + lambda ||q||_2 sigma_p

    The standard deviation is the population's, per dimension. The paper does not specify this.
    """

    name = "mean_and_spread"
    has_spread = True
    triton_summarise = _summarise

    @staticmethod
    def summarise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `StatisticsKind.summarise`."""
        mean = keys.mean(dim=-2, keepdim=True)
        # At equal keys a norm has the gradient zero; a square root has none.
        norm = torch.linalg.vector_norm((keys - mean).flatten(-2), dim=-1)
        return mean, norm / math.sqrt(keys.shape[-2])
