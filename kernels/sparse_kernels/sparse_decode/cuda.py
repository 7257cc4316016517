"""A decode step on CUDA.

One launch routes, scores, selects and attends: with few rows (query tokens times KV heads), where launches and the
latency between them are most of the cost, a cluster of blocks to a row, with many one block. Before compute capability
9.0, which has no clusters, scoring is a launch of its own, and so it is for the kinds of statistics that
`page_score.triton` scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from sparse_kernels.cuda.launch import FORMATS, int32, int64, kernel
from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.group_routing.cuda import routing_arguments, skipped_groups
from sparse_kernels.page_score.cuda import format_of, launch_scores, statistics_arguments, weight_of
from sparse_kernels.page_statistics import PageStatistics
from sparse_kernels.page_topk.cuda import MAX_SEGMENT, check_k
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_attention.cuda import (
    CHAINS,
    cache_arguments,
    chain_bytes,
    is_wide,
    least_cluster,
    merging_bytes,
)
from sparse_kernels.termination import StopRule

_SOURCE = Path(__file__).with_name("decode.cu")
# Candidates, counts and floors of `Select` in select.cuh; what grows with the warps comes on top.
_SELECT_BYTES = 4 * (1024 + 64) + 2 * 1024 + 4 * 32 + 32


class Launch(NamedTuple):
    """How the work of a row is laid out; its result does not depend on it."""

    fused: bool
    cluster: int
    warps: int
    blocks_per_sm: int


# By the number of rows, as measured on an H200: about one wave of blocks, and large blocks where they suffice.
_LAUNCHES = (
    (8, Launch(True, cluster=8, warps=16, blocks_per_sm=1)),
    (24, Launch(True, cluster=4, warps=16, blocks_per_sm=1)),
    (66, Launch(True, cluster=2, warps=16, blocks_per_sm=1)),
    (132, Launch(True, cluster=1, warps=16, blocks_per_sm=1)),
    (1 << 62, Launch(True, cluster=1, warps=8, blocks_per_sm=2)),
)
# Where attention may stop a warp works on one chain at most.
_STOPPING_LAUNCHES = (
    (8, Launch(True, cluster=8, warps=16, blocks_per_sm=1)),
    (24, Launch(True, cluster=4, warps=16, blocks_per_sm=1)),
    (1 << 62, Launch(True, cluster=4, warps=8, blocks_per_sm=2)),
)
# Scores of a launch of their own read faster, which counts beyond this many pages; with wide records and rows that
# keep every multiprocessor busy already from half as many.
_MANY_PAGES = 1 << 15
_WIDE_RECORD_BYTES = 256
_MANY_ROWS = 224


def launch_of(
    num_rows: int,
    group_size: int,
    head_size: int,
    max_pages: int,
    record_bytes: int,
    device: torch.device,
    stopping: bool = False,
) -> Launch:
    """The launch configuration of a batch.

    Args:
        num_rows: query tokens times KV heads.
        group_size: query heads of a KV head.
        head_size: elements of a head.
        max_pages: pages of the longest context there can be.
        record_bytes: bytes of a page's vectors; 0 if nothing is scored.
        device: where it runs.
        stopping: whether attention may stop.

    Raises:
        ValueError: if attention is to stop before compute capability 9.0, where the chains of a row find no room.
    """
    major, _ = torch.cuda.get_device_capability(device)
    wide = is_wide(group_size, head_size)
    if major < 9 and stopping:
        raise ValueError(f"rule: got one on compute capability {major}.x, allowed: 9.0 or later")
    if major < 9:
        return Launch(False, 1, warps=8, blocks_per_sm=1 if wide else 2)
    launch = next(
        launch for most_rows, launch in (_STOPPING_LAUNCHES if stopping else _LAUNCHES) if num_rows <= most_rows
    )
    if wide:
        launch = launch._replace(cluster=8 if stopping else launch.cluster, warps=8, blocks_per_sm=1)
    # Many wide records: half as many warps with twice the registers have as much on its way, and leave more cache.
    if not stopping and record_bytes >= _WIDE_RECORD_BYTES and 32 < num_rows <= 66:
        launch = launch._replace(warps=8)
    crowded = num_rows > _MANY_ROWS and record_bytes >= _WIDE_RECORD_BYTES
    if record_bytes and max_pages >= (_MANY_PAGES // 2 if crowded else _MANY_PAGES + 1):
        launch = launch._replace(fused=False)
    return launch._replace(cluster=max(launch.cluster, least_cluster(group_size, head_size)))


def _looks_bytes(launch: Launch, group_size: int) -> int:
    # `StoppingAttention::Looks` in stop.cuh.
    return group_size * ((CHAINS // launch.cluster + 2 * 8 + 1) * 34 * 4 + 4)


def _shared_bytes(launch: Launch, group_size: int, head_size: int, max_pages: int, k: int, stopping: bool) -> int:
    # Mirrors the layout in decode.cu, rounded up.
    rows = -(-group_size // 8) * 8
    values = chain_bytes(launch.cluster, group_size, head_size)
    keys = 2 * (-(-max_pages // 8) * 8)
    scoring = rows * head_size * 2 + rows * 8
    fixed = (
        merging_bytes(group_size, head_size)
        + scoring
        + _SELECT_BYTES
        + launch.warps * 8
        + max(0, 128 * launch.warps - 2048)
        + 64
        + (_looks_bytes(launch, group_size) if stopping else 0)
    )
    return -(-fixed // 16) * 16 + (max(values, keys) if launch.cluster == 1 else values + keys) + 4 * k


def _rule_arguments(
    rule: StopRule | None, visited: torch.Tensor | None, counters: torch.Tensor | None
) -> tuple[object, ...]:
    if rule is None:
        return ()
    tolerances = float(rule.scale_tolerance), float(rule.direction_tolerance)
    return *tolerances, int32(rule.patience), int32(rule.least_pages), visited, counters


def sparse_decode(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    statistics: PageStatistics | None,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    k: int,
    sink_pages: int,
    recent_pages: int,
    std_weight: float,
    scale: float,
    dense_tokens: int,
    dense_requests: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softcap: float,
    routing: GroupRouting | None,
    rule: StopRule | None,
    query_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    out: torch.Tensor,
    visited: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """See `api.sparse_decode`."""
    num_tokens, num_query_heads, head_size = query.shape
    num_kv_heads = keys.num_kv_heads
    group_size = num_query_heads // num_kv_heads
    check_k(k)
    # Columns beyond what the kernels can select from stand for no context that is served.
    max_pages = min(block_table.shape[1] * keys.pages_per_block, MAX_SEGMENT)
    stopping = rule is not None
    record_bytes = 0 if statistics is None else statistics.vectors.shape[3] * statistics.vectors.element_size()
    launch = launch or launch_of(
        num_tokens * num_kv_heads, group_size, head_size, max_pages, record_bytes, query.device, stopping
    )
    if statistics is not None and not statistics.kind.is_fused:
        launch = launch._replace(fused=False)
    macros = {
        "QUERY": FORMATS[query.dtype],
        "KV": FORMATS[keys.view.dtype],
        "MEAN": format_of(statistics) if statistics is not None and launch.fused else FORMATS[torch.int8],
        "OUTPUT": FORMATS[out.dtype],
        "GROUP": group_size,
        "HEAD_SIZE": head_size,
        "PAGE_SIZE": keys.page_size,
        "PAGES_PER_BLOCK": keys.pages_per_block,
        "FUSED": int(launch.fused),
        "CLUSTER": launch.cluster,
        "WARPS": launch.warps,
        "BLOCKS_PER_SM": launch.blocks_per_sm,
        "STOP_TILES": rule.block_tokens // 8 if rule else 0,
    }
    compiled = kernel(_SOURCE, query.device, macros, 32 * launch.warps)
    shared_bytes = _shared_bytes(launch, group_size, head_size, max_pages, k, stopping)
    compiled.reserve_shared(shared_bytes, launch.blocks_per_sm)
    scores = None
    if statistics is not None and not launch.fused:
        width = -(-max_pages // 8) * 8
        scores = torch.empty((num_tokens, num_kv_heads, width), dtype=torch.bfloat16, device=query.device)
        skipped = None
        if routing is not None:
            skipped = skipped_groups(query, keys, block_table, seq_lens, routing, dense_tokens, dense_requests)
        launch_scores(query, statistics, block_table, seq_lens, keys.page_size, std_weight, scores, skipped)
    compiled.launch(
        (launch.cluster, num_kv_heads, num_tokens),
        query, int64(query.stride(0)), int64(query.stride(1)),
        *cache_arguments(keys, values),
        *statistics_arguments(statistics),
        scores, int64(0 if scores is None else scores.stride(1)),
        block_table, int64(block_table.stride(0)), seq_lens, dense_requests,
        int32(num_tokens // len(seq_lens)), int32(k), int32(sink_pages), int32(recent_pages), int32(dense_tokens),
        *routing_arguments(routing), weight_of(statistics, std_weight), float(scale), float(softcap), sinks,
        query_scale, key_scale, value_scale, out, int64(out.stride(0)), *_rule_arguments(rule, visited, counters),
        shared_bytes=shared_bytes,
    )  # fmt: skip
