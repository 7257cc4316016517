"""Routed attention on CUDA: blocks to the pieces of each context, then one to each query head that adds the pieces up.

Pieces are cut by the context's length, so that a few long contexts fill a GPU and the result does not depend on the
batch. Blocks of skipped groups, and those beyond the pieces of a short context, end at once; with many rows a block
takes several pieces.

Under a rule blocks begin with the first pieces of all rows, and those of a row that has stopped end at once (scan.cuh).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from sparse_kernels.cuda.launch import FORMATS, int32, int64, kernel
from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.group_routing.cuda import routing_arguments
from sparse_kernels.paging import PagedTensor
from sparse_kernels.routed_attention.api import pieces_of, rows_at_once, scratch_numbers, stop_scratch
from sparse_kernels.sparse_attention.cuda import cache_arguments, is_wide
from sparse_kernels.termination import StopRule

_ATTEND = Path(__file__).with_name("attend.cu")
_MERGE = Path(__file__).with_name("merge.cu")
LEAST_TOKENS = 256
"""Tokens of a piece, at least."""
_MERGING_THREADS = 512


class _Blocks(NamedTuple):
    """Blocks that attend."""

    warps: int
    per_sm: int
    """That a multiprocessor has room for, of narrow heads; half of them of wide ones."""


_PLAIN = _Blocks(8, 2)
_STOPPING = _Blocks(4, 4)
"""While one of them tells of its piece, or looks, the others of its multiprocessor read."""
_WAVES = 2
"""So often a GPU is filled with blocks, where rows and pieces give them: what skipped groups leave is then taken, and a
block has several pieces for what it costs to begin."""


class Launch(NamedTuple):
    """What a launch may choose: no output depends on it."""

    blocks: int
    """That share the pieces, about."""
    pieces_per_look: int = 1
    """Neighbouring pieces that are looked at together, a power of two, 32 at most."""


_STOPPING_BLOCKS = 8192
"""About as many where attention may stop: the pieces of a row are best begun one after the other."""
_MOST_PIECES_PER_LOOK = 4


def _launch(rule: StopRule | None, rows: int, filled: int) -> Launch:
    if rule is None:
        return Launch(_WAVES * filled)
    # As many of a row's pieces are under way at the same time anyway.
    together = max(1, min(_MOST_PIECES_PER_LOOK, filled // rows))
    return Launch(_STOPPING_BLOCKS, 1 << together.bit_length() - 1)


def _shared_bytes(warps: int, group_size: int, head_size: int, stopping: bool) -> int:
    # Mirrors the layout in attend.cu, rounded up.
    rows = -(-group_size // 8) * 8
    fixed = rows * (head_size + 32) * 2 + (2 * warps + 1) * group_size * 4
    values = warps * group_size * head_size * 4
    if stopping:
        # `Shared` and `Probes` in scan.cuh; the latter lie where the values were.
        fixed += 4 * group_size + 16
        values = max(values, min(warps, group_size) * 33 * 33 * 4)
    return -(-fixed // 16) * 16 + 16 + values


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
    rule: StopRule | None = None,
    sink_pages: int = 0,
    sinks: torch.Tensor | None = None,
    visited: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """See `api.routed_attention`."""
    num_tokens, num_query_heads, head_size = query.shape
    num_kv_heads = keys.num_kv_heads
    group_size = num_query_heads // num_kv_heads
    rows = num_tokens * num_kv_heads
    if rule is not None:
        context_tokens = block_table.shape[1] * keys.page_size * keys.pages_per_block
        splits = pieces_of(context_tokens, rule)
        requests, per_request = len(seq_lens), num_tokens // len(seq_lens)
        if scratch is not None and len(scratch) < per_request * num_kv_heads * scratch_numbers(splits):
            scratch = None
        most_rows = rows_at_once(splits, group_size, head_size)
        if scratch is not None:
            most_rows = min(most_rows, len(scratch) // scratch_numbers(splits))
        at_once = max(1, most_rows // (per_request * num_kv_heads))
        if at_once < requests:
            for first in range(0, requests, at_once):
                some = slice(first, first + at_once)
                tokens = slice(first * per_request, (first + at_once) * per_request)
                routed_attention(
                    query[tokens], keys, values, block_table[some], seq_lens[some], routing, scale, dense_tokens,
                    None if dense_requests is None else dense_requests[some], softcap, query_scale, key_scale,
                    value_scale, splits, out[tokens], rule, sink_pages, sinks,
                    None if visited is None else visited[tokens], counters, scratch, launch,
                )  # fmt: skip
            return
        if scratch is None:
            scratch = stop_scratch(rows, context_tokens, rule, query.device)
    shape = {"GROUP": group_size, "HEAD_SIZE": head_size}
    warps, blocks_per_sm = _STOPPING if rule else _PLAIN
    if is_wide(group_size, head_size):
        blocks_per_sm //= 2
    attend = kernel(
        _ATTEND,
        query.device,
        {
            **shape,
            "QUERY": FORMATS[query.dtype],
            "KV": FORMATS[keys.view.dtype],
            "BLOCK_TOKENS": keys.page_size * keys.pages_per_block,
            "LEAST_TOKENS": LEAST_TOKENS,
            "WARPS": warps,
            "BLOCKS_PER_SM": blocks_per_sm,
            "STOP_TOKENS": rule.block_tokens if rule else 0,
            **({"PAGE_SIZE": keys.page_size} if rule else {}),
        },
        32 * warps,
    )
    parts = _MERGING_THREADS // head_size
    merge = kernel(
        _MERGE,
        query.device,
        {**shape, "OUTPUT": FORMATS[out.dtype], "SPLITS": 0 if rule else splits, "PARTS": parts},
        parts * head_size,
        "merge_pieces",
    )
    if launch is None:
        filled = blocks_per_sm * torch.cuda.get_device_properties(query.device).multi_processor_count
        launch = _launch(rule, rows, filled)
    shared_bytes = _shared_bytes(warps, group_size, head_size, rule is not None)
    attend.reserve_shared(shared_bytes, blocks_per_sm)
    piece_values = torch.empty((rows, splits, group_size * head_size), dtype=torch.float32, device=query.device)
    piece_weights = torch.empty((rows, splits, group_size, 2), dtype=torch.float32, device=query.device)
    piece_counts = torch.empty(rows, dtype=torch.int32, device=query.device)
    shares = max(1, min(splits, launch.blocks // rows))
    rule_arguments: tuple[object, ...] = ()
    if rule is not None:
        # What the scan of a row is at between two blocks: `Scan::states` and `Scan::consecutive`.
        states = torch.empty((rows, group_size, 32, 4), dtype=torch.float32, device=query.device)
        consecutive = torch.empty(rows, dtype=torch.int32, device=query.device)
        rule_arguments = (
            float(rule.scale_tolerance), float(rule.direction_tolerance), int32(rule.patience),
            int32(rule.least_pages), int32(sink_pages), int32(launch.pieces_per_look), sinks, value_scale, scratch,
            states, consecutive, visited, counters,
        )  # fmt: skip
    attend.launch(
        (shares, num_kv_heads, num_tokens) if rule is None else (num_kv_heads, num_tokens, shares),
        query, int64(query.stride(0)), int64(query.stride(1)),
        *cache_arguments(keys, values),
        block_table, int64(block_table.stride(0)), seq_lens, dense_requests,
        int32(num_tokens // len(seq_lens)), int32(dense_tokens), *routing_arguments(routing),
        float(scale), float(softcap), query_scale, key_scale, int32(splits),
        piece_values, piece_weights, piece_counts, *rule_arguments,
        shared_bytes=shared_bytes,
    )  # fmt: skip
    merge.launch(
        (group_size, num_kv_heads, num_tokens),
        piece_values, piece_weights, piece_counts, int32(splits), value_scale, out, int64(out.stride(0)),
        *((sinks, scratch) if rule else ()),
    )  # fmt: skip
