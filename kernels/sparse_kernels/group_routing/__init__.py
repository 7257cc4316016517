"""Decides which KV groups a decoding token skips (SinkRouter)."""

from sparse_kernels.group_routing.api import group_scores, route_groups
from sparse_kernels.rules import GROUP_SCORES, GroupRouting, GroupScore

__all__ = ["GROUP_SCORES", "GroupRouting", "GroupScore", "group_scores", "route_groups"]
