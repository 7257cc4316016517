"""What a decode step omits: skipped KV groups (SinkRouter), and the context after an early stop (ART).

Several operations and the parameters of the CUDA kernels share these types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

GroupScore = Literal["mean", "max", "min"]
GROUP_SCORES: tuple[GroupScore, ...] = get_args(GroupScore)
"""Every score, in the order of its number in the kernels."""


@dataclass(frozen=True)
class GroupRouting:
    """The KV groups of one layer that are skipped because they are sink groups (SinkRouter, Eq. 12 and 13).

    The threshold of a context of n tokens is `c0 + c1 x + c2 x^2 + c3 x^3`. x is linear in log n, from 0 at `shortest`
    to 1 at `longest`, and constant outside this range. The paper does not say how it normalises the length.
    """

    coefficients: torch.Tensor
    """`[num_kv_heads, 4]` float32, contiguous: c0 to c3 of each KV head; a constant threshold has only c0."""
    score: GroupScore = "mean"
    """How the cosines of a group's query heads become one score."""
    shortest: int = 1
    """Tokens of the context at which x is 0."""
    longest: int = 2
    """Tokens of the context at which x is 1."""
    counts: torch.Tensor | None = None
    """`[num_kv_heads, 2]` int64, contiguous: skipped groups and all groups. Attention kernels add their decisions;
    `route_groups` does not."""

    @property
    def log_range(self) -> tuple[float, float]:
        """The base-2 logarithm of `shortest`, and the factor from a difference of base-2 logarithms to x."""
        first = math.log2(self.shortest)
        return first, 1 / (math.log2(self.longest) - first)

    def thresholds(self, context_lens: torch.Tensor) -> torch.Tensor:
        """Returns the thresholds of contexts.

        Args:
            context_lens: `[num_tokens]` integer, at least 1.

        Returns:
            `[num_tokens, num_kv_heads]` float32.
        """
        first, step = self.log_range
        x = ((context_lens.float().log2() - first) * step).clamp(0, 1)[:, None]
        c0, c1, c2, c3 = self.coefficients.unbind(dim=1)
        return ((c3 * x + c2) * x + c1) * x + c0

    def check(self, num_kv_heads: int) -> None:
        """Raises ValueError unless thresholds and counts match the number of KV heads."""
        shape = tuple(self.coefficients.shape)
        if shape != (num_kv_heads, 4):
            raise ValueError(f"coefficients: got {list(shape)}, allowed: [{num_kv_heads}, 4]")
        if self.coefficients.dtype != torch.float32:
            raise ValueError(f"coefficients: got {self.coefficients.dtype}, allowed: torch.float32")
        if self.counts is not None and tuple(self.counts.shape) != (num_kv_heads, 2):
            raise ValueError(f"counts: got {list(self.counts.shape)}, allowed: [{num_kv_heads}, 2]")


PROBE_SIZE = 32
"""Elements of an output that a stop test compares, as many as a warp has lanes."""


class StopRule(NamedTuple):
    """Stop after `patience` consecutive stable test intervals.

    A test interval is `block_tokens` tokens. o(t) is the normalised attention of a query head over the intervals 1 to
    t; the probe x(t) is some of its elements. Interval t is stable if ||x(t) - x(t-1)|| < `scale_tolerance` and
    1 - cos(x(t), x(t-1)) < `direction_tolerance`. The first interval is never stable, and neither is one without a
    defined cosine. The query heads of a KV head read the same tokens, so an interval counts only if it is stable for
    all of them. The paper does not describe groups.
    """

    scale_tolerance: float
    """The paper's tau."""
    direction_tolerance: float
    """The paper's phi. Above 2 every direction passes."""
    patience: int
    """The paper's p; 0 never stops."""
    block_tokens: int
    """Tokens of complete pages between two stop tests; a multiple of the page size."""
    least_pages: int = 0
    """Pages at the start that are always read."""

    def check(self, page_size: int) -> None:
        """Raises ValueError unless a test interval holds whole pages."""
        if self.block_tokens < 1 or self.block_tokens % page_size:
            raise ValueError(f"block_tokens: got {self.block_tokens}, allowed: a multiple of the page size {page_size}")


def probe_elements(head_size: int) -> list[int]:
    """Returns the elements of an output that form the probe: evenly spaced, all if there are at most `PROBE_SIZE`."""
    size = min(PROBE_SIZE, head_size)
    return [i * head_size // size for i in range(size)]
