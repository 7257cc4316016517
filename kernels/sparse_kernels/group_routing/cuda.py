"""Routes groups on CUDA before a separate launch of scores.

Without a separate launch of scores, the attention kernels route groups themselves (`route.cuh`). This launch tells the
score launch which groups need no scores.
"""

from __future__ import annotations

from pathlib import Path

import torch

from sparse_kernels.batch import DecodeBatch
from sparse_kernels.cache import KVCache
from sparse_kernels.cuda.launch import FORMATS, kernel
from sparse_kernels.cuda.params import CacheParams, ContextParams, QueryParams, RoutingParams, pointer, struct_of
from sparse_kernels.rules import GroupRouting

_SOURCE = Path(__file__).with_name("route.cu")
_MOST_WARPS = 8


def skipped_groups(batch: DecodeBatch, cache: KVCache, routing: GroupRouting, counts: bool = False) -> torch.Tensor:
    """Decides which KV groups are skipped, bit for bit as the attention kernels do.

    Args:
        batch: the requests that decode; requests that are attended whole are not routed.
        cache: their keys.
        routing: thresholds of the layer.
        counts: whether this launch counts the decisions, because the attention kernels receive them.

    Returns:
        `[num_tokens, num_kv_heads]` uint8, 1 for a skipped group.
    """
    group_size = batch.group_size(cache.num_kv_heads)
    macros = {
        "QUERY": FORMATS[batch.query.dtype],
        "KV": FORMATS[cache.keys.view.dtype],
        "GROUP": group_size,
        "HEAD_SIZE": cache.head_size,
        "WARPS": min(group_size, _MOST_WARPS),
        "COUNTS": int(counts),
    }
    device = batch.query.device
    skipped = torch.empty((batch.num_tokens, cache.num_kv_heads), dtype=torch.uint8, device=device)
    params = struct_of("RouteParams")(
        query=QueryParams.of(batch.query),
        cache=CacheParams.of(cache),
        contexts=ContextParams.of(batch),
        routing=RoutingParams.of(routing),
        skipped=pointer(skipped),
    )
    compiled = kernel(_SOURCE, device, macros, 32 * macros["WARPS"], "route_groups")
    compiled.launch((cache.num_kv_heads, batch.num_tokens, 1), params)
    return skipped
