"""Routed attention on CUDA: blocks to the pieces of each context, then one to each query head that adds the pieces up.

Pieces are cut by the context's length, so that a few long contexts fill a GPU and the result does not depend on the
batch. Blocks of skipped groups, and those beyond the pieces of a short context, end at once; with many rows a block
takes several pieces.
"""

from __future__ import annotations

from pathlib import Path

import torch

from sparse_kernels.cuda.launch import FORMATS, int32, int64, kernel
from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.group_routing.cuda import routing_arguments
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_attention.cuda import cache_arguments, is_wide

_ATTEND = Path(__file__).with_name("attend.cu")
_MERGE = Path(__file__).with_name("merge.cu")
_WARPS = 8
LEAST_TOKENS = 256
"""Tokens of a piece, at least."""
_MERGING_THREADS = 512
_WAVES = 2
"""So often a GPU is filled with blocks, where rows and pieces give them: what skipped groups leave is then taken, and a
block has several pieces for what it costs to begin."""


def _shared_bytes(group_size: int, head_size: int) -> int:
    # Mirrors the layout in attend.cu, rounded up.
    rows = -(-group_size // 8) * 8
    fixed = rows * (head_size + 32) * 2 + (2 * _WARPS + 1) * group_size * 4
    return -(-fixed // 16) * 16 + 16 + _WARPS * group_size * head_size * 4


def routed_attention(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    routing: GroupRouting | None,
    scale: float,
    dense_tokens: int,
    dense_requests: torch.Tensor | None,
    softcap: float,
    query_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    splits: int,
    out: torch.Tensor,
    blocks: int | None = None,
) -> None:
    """See `api.routed_attention`."""
    num_tokens, num_query_heads, head_size = query.shape
    num_kv_heads = keys.num_kv_heads
    group_size = num_query_heads // num_kv_heads
    shape = {"GROUP": group_size, "HEAD_SIZE": head_size}
    blocks_per_sm = 1 if is_wide(group_size, head_size) else 2
    attend = kernel(
        _ATTEND,
        query.device,
        {
            **shape,
            "QUERY": FORMATS[query.dtype],
            "KV": FORMATS[keys.view.dtype],
            "BLOCK_TOKENS": keys.page_size * keys.pages_per_block,
            "LEAST_TOKENS": LEAST_TOKENS,
            "WARPS": _WARPS,
            "BLOCKS_PER_SM": blocks_per_sm,
        },
        32 * _WARPS,
    )
    parts = _MERGING_THREADS // head_size
    merge = kernel(
        _MERGE,
        query.device,
        {**shape, "OUTPUT": FORMATS[out.dtype], "SPLITS": splits, "PARTS": parts},
        parts * head_size,
        "merge_pieces",
    )
    if blocks is None:
        blocks = _WAVES * blocks_per_sm * torch.cuda.get_device_properties(query.device).multi_processor_count
    shared_bytes = _shared_bytes(group_size, head_size)
    attend.reserve_shared(shared_bytes, blocks_per_sm)
    rows = num_tokens * num_kv_heads
    piece_values = torch.empty((rows, splits, group_size * head_size), dtype=torch.float32, device=query.device)
    piece_weights = torch.empty((rows, splits, group_size, 2), dtype=torch.float32, device=query.device)
    piece_counts = torch.empty(rows, dtype=torch.int32, device=query.device)
    attend.launch(
        (max(1, min(splits, blocks // rows)), num_kv_heads, num_tokens),
        query, int64(query.stride(0)), int64(query.stride(1)),
        *cache_arguments(keys, values),
        block_table, int64(block_table.stride(0)), seq_lens, dense_requests,
        int32(num_tokens // len(seq_lens)), int32(dense_tokens), *routing_arguments(routing),
        float(scale), float(softcap), query_scale, key_scale, int32(splits),
        piece_values, piece_weights, piece_counts,
        shared_bytes=shared_bytes,
    )  # fmt: skip
    merge.launch(
        (group_size, num_kv_heads, num_tokens),
        piece_values, piece_weights, piece_counts, int32(splits), value_scale, out, int64(out.stride(0)),
    )  # fmt: skip
