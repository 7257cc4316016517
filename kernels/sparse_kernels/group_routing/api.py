"""Entry point of the group-routing operation."""

from __future__ import annotations

import torch

from sparse_kernels.batch import QueryTokens
from sparse_kernels.group_routing import reference
from sparse_kernels.paging import PagedTensor
from sparse_kernels.rules import GROUP_SCORES, GroupRouting, GroupScore


def route_groups(tokens: QueryTokens, keys: PagedTensor, routing: GroupRouting) -> torch.Tensor:
    """Decides which KV groups are skipped.

    SinkRouter, Eq. 11 to 13: `c_h = q_h . k_0 / (||q_h|| ||k_0||)` is the cosine of a query head with token 0's key.
    The cosines of a group become one score. The group is skipped if its score is at least the threshold for the
    context's length. NaN skips nothing. The cosine of a zero vector is 0.

    Args:
        tokens: the query tokens. Positive factors of their queries do not matter.
        keys: the cached keys.
        routing: thresholds of the layer. Its counts are not changed.

    Returns:
        `[num_tokens, num_kv_heads]` bool, True for skipped groups, whose output is zero.

    Raises:
        ValueError: if the shapes disagree.
    """
    tokens.check(keys.num_kv_heads, keys.head_size)
    routing.check(keys.num_kv_heads)
    query = tokens.query
    if len(tokens) == 0:
        return torch.zeros((0, keys.num_kv_heads), dtype=torch.bool, device=query.device)
    scores = reference.score_groups(query, keys, tokens.block_table[:, 0], GROUP_SCORES.index(routing.score))
    return scores >= routing.thresholds(tokens.context_lens)


def group_scores(query: torch.Tensor, anchors: torch.Tensor, score: GroupScore) -> torch.Tensor:
    """Scores groups, given their queries and the key of token 0 (SinkRouter, Eq. 11 and 12).

    Args:
        query: `[..., group_size, head_size]`, any float dtype.
        anchors: `[..., head_size]`, the keys of token 0.
        score: how the cosines of a group's heads become one.

    Returns:
        `[...]`, at least float32.
    """
    return reference.aggregate(reference.cosines(query, anchors), GROUP_SCORES.index(score))
