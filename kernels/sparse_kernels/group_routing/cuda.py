"""Group routing on CUDA: a part of the kernels that attend (`route.cuh`), which take these arguments.

What is scored before that, by a launch of its own, is told by one before it which groups need no scores.
"""

from __future__ import annotations

from pathlib import Path

import torch

from sparse_kernels.cuda.launch import FORMATS, int32, int64, kernel
from sparse_kernels.group_routing.api import GROUP_SCORES, GroupRouting
from sparse_kernels.paging import PagedTensor

_SOURCE = Path(__file__).with_name("route.cu")
_MOST_WARPS = 8


def routing_arguments(routing: GroupRouting | None) -> tuple[object, ...]:
    """Thresholds, score, range of the cubic and counts, as the kernels take them; null pointers without routing."""
    if routing is None:
        return None, int32(0), 0.0, 0.0, None
    first, step = routing.log_range
    return routing.coefficients, int32(GROUP_SCORES.index(routing.score)), first, step, routing.counts


def skipped_groups(
    query: torch.Tensor,
    keys: PagedTensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    routing: GroupRouting,
    dense_tokens: int,
    dense_requests: torch.Tensor | None,
) -> torch.Tensor:
    """Which KV groups the kernels that attend will skip: bit for bit their decisions, which they count themselves.

    Args:
        query: `[num_tokens, num_query_heads, head_size]`, any strides but a contiguous last dimension.
        keys: the cached keys.
        block_table: `[num_requests, max_blocks]` int32.
        seq_lens: `[num_requests]` int32.
        routing: thresholds of the layer.
        dense_tokens: contexts up to this length are not routed.
        dense_requests: `[num_requests]` bool, requests that are not routed.

    Returns:
        `[num_tokens, num_kv_heads]` uint8, 1 for a group that is skipped.
    """
    num_tokens, num_query_heads, head_size = query.shape
    group_size = num_query_heads // keys.num_kv_heads
    macros = {
        "QUERY": FORMATS[query.dtype],
        "KV": FORMATS[keys.view.dtype],
        "GROUP": group_size,
        "HEAD_SIZE": head_size,
        "WARPS": min(group_size, _MOST_WARPS),
    }
    block_stride, head_stride = (keys.view.stride(dim) * keys.view.element_size() for dim in (0, 1))
    skipped = torch.empty((num_tokens, keys.num_kv_heads), dtype=torch.uint8, device=query.device)
    kernel(_SOURCE, query.device, macros, 32 * macros["WARPS"], "route_groups").launch(
        (keys.num_kv_heads, num_tokens),
        query, int64(query.stride(0)), int64(query.stride(1)),
        keys.view, int64(block_stride), int64(head_stride),
        block_table, int64(block_table.stride(0)), seq_lens, dense_requests,
        int32(num_tokens // len(seq_lens)), int32(dense_tokens), *routing_arguments(routing), skipped,
    )  # fmt: skip
    return skipped
