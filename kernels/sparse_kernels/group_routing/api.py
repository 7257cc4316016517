"""Entry point of the group-routing operation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from sparse_kernels.batch import QueryTokens
from sparse_kernels.group_routing import reference
from sparse_kernels.paging import PagedTensor

GroupScore = Literal["mean", "max", "min"]
GROUP_SCORES: tuple[GroupScore, ...] = get_args(GroupScore)
"""Every score, in the order in which the kernels number them."""


@dataclass(frozen=True)
class GroupRouting:
    """Which KV groups of one layer are skipped, because they are sink groups (SinkRouter, Eq. 12 and 13).

    The threshold of a context of n tokens is `c0 + c1 x + c2 x^2 + c3 x^3`, where x goes from 0 at `shortest` to 1 at
    `longest` as the logarithm of n does, and stays there beyond. The paper normalises the length without saying how.
    """

    coefficients: torch.Tensor
    """`[num_kv_heads, 4]` float32, contiguous: c0 to c3 of each KV head; a constant threshold has c0 alone."""
    score: GroupScore = "mean"
    """How the cosines of a group's query heads become one score."""
    shortest: int = 1
    """Tokens of the context at which x is 0."""
    longest: int = 2
    """Tokens of the context at which x is 1."""
    counts: torch.Tensor | None = None
    """`[num_kv_heads, 2]` int64, contiguous: groups skipped and groups asked for. Attention adds its decisions to them;
    `route_groups` alone adds none."""

    @property
    def log_range(self) -> tuple[float, float]:
        """The base-2 logarithm of `shortest`, and the factor that makes x of a logarithm's distance to it."""
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
        """Raises ValueError unless thresholds and counts are those of as many KV heads."""
        shape = tuple(self.coefficients.shape)
        if shape != (num_kv_heads, 4):
            raise ValueError(f"coefficients: got {list(shape)}, allowed: [{num_kv_heads}, 4]")
        if self.counts is not None and tuple(self.counts.shape) != (num_kv_heads, 2):
            raise ValueError(f"counts: got {list(self.counts.shape)}, allowed: [{num_kv_heads}, 2]")


def route_groups(tokens: QueryTokens, keys: PagedTensor, routing: GroupRouting) -> torch.Tensor:
    """Decides which KV groups are skipped: their queries' cosines with token 0's key reach the threshold.

    SinkRouter, Eq. 11 to 13: `c_h = q_h . k_0 / (||q_h|| ||k_0||)`. A group's c_h become one score, and the group is
    skipped where that is at least the threshold of the context's length. A score that is NaN skips nothing. A vector
    of zeros has a cosine of 0.

    Args:
        tokens: the query tokens. Positive factors of their queries do not matter.
        keys: the cached keys.
        routing: thresholds of the layer. Its counts are left alone.

    Returns:
        `[num_tokens, num_kv_heads]` bool, True for groups that are skipped, whose output is zero.

    Raises:
        ValueError: if the shapes disagree.
    """
    tokens.check(keys.num_kv_heads, keys.head_size)
    routing.check(keys.num_kv_heads)
    query = tokens.query
    if len(tokens) == 0:
        return torch.zeros((0, keys.num_kv_heads), dtype=torch.bool, device=query.device)
    implementation = reference.score_groups
    if query.device.type == "cpu" and keys.view.dtype == torch.bfloat16:
        from sparse_kernels.group_routing import cpu

        implementation = cpu.score_groups
    scores = implementation(query, keys, tokens.block_table[:, 0], GROUP_SCORES.index(routing.score))
    return scores >= routing.thresholds(tokens.context_lens)


def group_scores(query: torch.Tensor, anchors: torch.Tensor, score: GroupScore) -> torch.Tensor:
    """Scores groups whose queries and key of token 0 are at hand (SinkRouter, Eq. 11 and 12).

    Args:
        query: `[..., group_size, head_size]`, any float dtype.
        anchors: `[..., head_size]`, the keys of token 0.
        score: how the cosines of a group's heads become one.

    Returns:
        `[...]`, at least float32.
    """
    return reference.aggregate(reference.cosines(query, anchors), GROUP_SCORES.index(score))
