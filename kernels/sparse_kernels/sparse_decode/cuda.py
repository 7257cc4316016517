"""Makes a decode step on CUDA.

One launch routes, scores, selects and attends. With few rows (query tokens times KV heads), where launches and the
latency between them are most of the cost, a row has a cluster of blocks; with many it has one block. Before compute
capability 9.0 there are no clusters, and scoring is a launch of its own; so it is for the kinds of statistics that
`page_score.triton` scores.
"""

from __future__ import annotations

from pathlib import Path

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.cuda.launch import FORMATS, kernel
from sparse_kernels.cuda.params import (
    CacheParams,
    ContextParams,
    DecodeParams,
    OutputParams,
    QueryParams,
    RoutingParams,
    SelectionParams,
    SoftmaxParams,
    StatisticsParams,
    StopParams,
    pointer,
)
from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.group_routing.cuda import skipped_groups
from sparse_kernels.limits import MAX_K, MAX_PAGES, DecodeShape
from sparse_kernels.page_score.cuda import format_of, launch_scores
from sparse_kernels.sparse_decode.launches import Launch, fixed_bytes, launch_of, shared_bytes, values_bytes
from sparse_kernels.stopping import StopRule

_SOURCE = Path(__file__).with_name("decode.cu")


def sparse_decode(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    selection: PageSelection,
    routing: GroupRouting | None,
    rule: StopRule | None,
    output: DecodeOutput,
    launch: Launch | None = None,
) -> None:
    """See `api.sparse_decode`."""
    statistics, device = cache.statistics, batch.query.device
    if selection.k > MAX_K:
        raise ValueError(f"k: got {selection.k}, allowed on CUDA: up to {MAX_K}")
    # Columns beyond what the kernels can select from stand for no context that is served.
    max_pages = min(batch.block_table.shape[1] * cache.keys.pages_per_block, MAX_PAGES)
    group_size = batch.group_size(cache.num_kv_heads)
    shape = DecodeShape(group_size, cache.head_size, max_pages, selection.k, rule is not None)
    if launch is None:
        record_bytes = 0 if statistics is None else statistics.vectors.shape[3] * statistics.vectors.element_size()
        rows = batch.num_tokens * cache.num_kv_heads
        launch = launch_of(rows, shape, record_bytes, torch.cuda.get_device_capability(device))
    if statistics is not None and not statistics.kind.is_fused:
        launch = launch._replace(fused=False)
    macros = {
        "QUERY": FORMATS[batch.query.dtype],
        "KV": FORMATS[cache.keys.view.dtype],
        "RECORD": format_of(statistics) if statistics is not None and launch.fused else FORMATS[torch.int8],
        "OUTPUT": FORMATS[output.heads.dtype],
        "GROUP": group_size,
        "HEAD_SIZE": cache.head_size,
        "PAGE_SIZE": cache.page_size,
        "PAGES_PER_BLOCK": cache.keys.pages_per_block,
        "FUSED": int(launch.fused),
        "CLUSTER": launch.cluster,
        "WARPS": launch.warps,
        "BLOCKS_PER_SM": launch.blocks_per_sm,
        "STOP_TILES": rule.block_tokens // 8 if rule else 0,
        "FIXED_BYTES": fixed_bytes(launch, shape),
        "VALUES_BYTES": values_bytes(launch, shape),
    }
    compiled = kernel(_SOURCE, device, macros, 32 * launch.warps)
    block_bytes = shared_bytes(launch, shape)
    compiled.reserve_shared(block_bytes, launch.blocks_per_sm)
    scores = None if statistics is None or launch.fused else _scores(batch, cache, selection, routing, max_pages)
    params = DecodeParams(
        QueryParams.of(batch.query, batch.query_scale),
        CacheParams.of(cache),
        StatisticsParams.of(statistics, selection.std_weight),
        pointer(scores),
        0 if scores is None else scores.stride(1),
        ContextParams.of(batch),
        SelectionParams.of(selection),
        RoutingParams.of(routing),
        SoftmaxParams.of(softmax),
        StopParams.of(rule),
        OutputParams.of(output),
    )
    compiled.launch((launch.cluster, cache.num_kv_heads, batch.num_tokens), params, block_bytes)


def _scores(
    batch: DecodeBatch, cache: KVCache, selection: PageSelection, routing: GroupRouting | None, max_pages: int
) -> torch.Tensor:
    """Scores all pages in a launch of its own, which leaves out the groups that are skipped."""
    assert cache.statistics is not None
    shape = batch.num_tokens, cache.num_kv_heads, -(-max_pages // 8) * 8
    scores = torch.empty(shape, dtype=torch.bfloat16, device=batch.query.device)
    skipped = None if routing is None else skipped_groups(batch, cache, routing)
    launch_scores(batch, cache.statistics, cache.page_size, selection.std_weight, scores, skipped)
    return scores
