"""Scores groups in torch: the specification."""

from __future__ import annotations

import torch

from sparse_kernels.paging import PagedTensor

LEAST_NORM = 1e-30
"""Smallest product of the norms of a query and a key, so that zero vectors have a cosine of 0."""


def cosines(query: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Returns the cosines of queries with their group's anchor (SinkRouter, Eq. 11).

    Args:
        query: `[..., group_size, head_size]`.
        anchor: `[..., head_size]`, key of token 0.

    Returns:
        `[..., group_size]` in the promoted dtype of both, at least float32.
    """
    dtype = torch.promote_types(torch.promote_types(query.dtype, anchor.dtype), torch.float32)
    query, anchor = query.to(dtype), anchor.to(dtype)
    norms: torch.Tensor = query.norm(dim=-1) * anchor.norm(dim=-1, keepdim=True)
    return (query * anchor.unsqueeze(-2)).sum(dim=-1) / norms.clamp(min=LEAST_NORM)


def aggregate(cosines: torch.Tensor, score: int) -> torch.Tensor:
    """Reduces the heads of a group, the last dimension, to one score: their mean, largest or smallest (Eq. 12)."""
    scores: tuple[torch.Tensor, ...] = cosines.mean(dim=-1), cosines.amax(dim=-1), cosines.amin(dim=-1)
    return scores[score]


def score_groups(query: torch.Tensor, keys: PagedTensor, first_blocks: torch.Tensor, score: int) -> torch.Tensor:
    """Scores every token's KV groups: `[num_tokens, num_kv_heads]` float32.

    Args:
        query: see `api.route_groups`.
        keys: the cached keys.
        first_blocks: `[num_tokens]` integer, the physical block that holds each token's token 0.
        score: index into `GROUP_SCORES`.
    """
    heads = torch.arange(keys.num_kv_heads, device=query.device)
    anchors = keys.gather(first_blocks.long()[:, None], heads, torch.zeros_like(heads))[:, :, 0]
    return aggregate(cosines(query.float(), anchors.float()), score)
