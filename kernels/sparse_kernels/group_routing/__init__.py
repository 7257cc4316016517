"""Decides which KV groups a decoding token can do without (SinkRouter)."""

from sparse_kernels.group_routing.api import GROUP_SCORES, GroupRouting, GroupScore, group_scores, route_groups

__all__ = ["GROUP_SCORES", "GroupRouting", "GroupScore", "group_scores", "route_groups"]
