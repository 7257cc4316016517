"""Which KV groups a decoding token can do without (SinkRouter)."""

from sparse_kernels.group_routing.api import GroupRouting, route_groups

__all__ = ["GroupRouting", "route_groups"]
