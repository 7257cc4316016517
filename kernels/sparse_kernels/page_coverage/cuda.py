"""Counts the pages of a coverage on CUDA.

The launch that scores also sums up each query head's weights. Another launch counts, with one thread block per row
(`best.cu`). Where rows are few, are too long for it or read too many pages, a row has a cluster of thread blocks
(`count.cu`), and the launch that scores also writes each query head's logits of every page. The host reads no length.
Sums do not depend on the batch. Rows with nothing to count return at once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from sparse_kernels.batch import DecodeBatch, PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.cuda.launch import FORMATS, cluster_of, kernel
from sparse_kernels.cuda.params import (
    CacheParams,
    ContextParams,
    CountParams,
    QueryParams,
    StatisticsParams,
    batch_of,
    pointer,
    score_rows,
)
from sparse_kernels.page_coverage.launches import (
    BEST_WARPS,
    FEW_ROWS,
    WARPS,
    best_bytes,
    best_fixed_bytes,
    counts_best,
    fixed_bytes,
    kept_bytes,
    kept_pages_of,
    requests_at_once,
)
from sparse_kernels.page_coverage.rule import Limits
from sparse_kernels.page_score.cuda import HeadWeights, format_of, launch_of, launch_scores

_ALL = Path(__file__).with_name("count.cu")
_BEST = Path(__file__).with_name("best.cu")
_LEAST_PAGES = 2048
"""Smallest number of pages of a row per thread block of a cluster. Each thread has a run of pages."""


def count_rows(
    batch: DecodeBatch,
    cache: KVCache,
    selection: PageSelection,
    softmax: Softmax,
    limits: Limits,
    counters: torch.Tensor | None = None,
) -> DecodeBatch:
    """See `api.count_rows`."""
    shape = batch.num_tokens, cache.num_kv_heads, _width(batch, cache)
    device, group_size = batch.query.device, batch.group_size(cache.num_kv_heads)
    scores = torch.empty(shape, dtype=torch.bfloat16, device=device)
    capability = torch.cuda.get_device_capability(device)
    few = batch.num_tokens * cache.num_kv_heads <= FEW_ROWS
    if not few and counts_best(shape[2], selection.k, group_size, cache.head_size, capability):
        counts = _count_best(batch, cache, scores, selection, softmax, limits, counters)
    else:
        counts = _count(batch, cache, scores, True, selection, softmax, limits, counters)
    return replace(batch, budgets=counts, scores=scores)


def count_pages(
    tokens: QueryTokens,
    cache: KVCache,
    scores: torch.Tensor,
    selection: PageSelection,
    softmax: Softmax,
    limits: Limits,
) -> torch.Tensor:
    """See `api.count_pages`."""
    batch = batch_of(tokens)
    width = _width(batch, cache)
    if scores.shape[2] != width or not scores.is_contiguous():
        scores = torch.nn.functional.pad(scores, (0, width - scores.shape[2])).contiguous()
    return _count(batch, cache, score_rows(scores), False, selection, softmax, limits, None).long()


def row_page_logits(token: QueryTokens, cache: KVCache, num_pages: int, softmax: Softmax) -> torch.Tensor:
    """See `api.row_page_logits`; the query has 16 bits."""
    batch, statistics = batch_of(token), cache.statistics
    assert statistics is not None
    width = _width(batch, cache)
    scores = torch.empty((1, cache.num_kv_heads, width), dtype=torch.bfloat16, device=token.query.device)
    heads = HeadWeights.empty(batch, statistics, width, softmax, PageSelection(1))
    launch_scores(batch, statistics, cache.page_size, 0.0, scores, heads=heads)
    assert heads.logits is not None
    return heads.logits[0, ..., :num_pages] * math.log(2) + math.log(cache.page_size)


def _width(batch: DecodeBatch, cache: KVCache) -> int:
    """Returns the pages of a row of scores: the pages of a block table's row, rounded up to eight."""
    return -(-batch.block_table.shape[1] * cache.keys.pages_per_block // 8) * 8


def _count_best(
    batch: DecodeBatch,
    cache: KVCache,
    scores: torch.Tensor,
    selection: PageSelection,
    softmax: Softmax,
    limits: Limits,
    counters: torch.Tensor | None,
) -> torch.Tensor:
    """Writes the scores of rows `[num_tokens, num_kv_heads]`, and counts them from their best pages."""
    statistics, num_kv_heads, width = cache.statistics, cache.num_kv_heads, scores.shape[2]
    assert statistics is not None
    group_size, device = batch.group_size(num_kv_heads), scores.device
    counts = torch.empty((batch.num_tokens, num_kv_heads), dtype=torch.int32, device=device)
    macros = {
        **_shape_of(batch, cache, BEST_WARPS),
        "RECORD": format_of(statistics),
        "PAGES_PER_BLOCK": cache.keys.pages_per_block,
        "SHARED_BYTES": best_fixed_bytes(group_size, batch.head_size),
    }
    shared_bytes = best_bytes(width, group_size, batch.head_size)
    compiled = kernel(_BEST, device, macros, 32 * BEST_WARPS, "count_best")
    compiled.reserve_shared(shared_bytes)
    heads = HeadWeights.empty(batch, statistics, width, softmax, selection, with_logits=False)
    launch_scores(batch, statistics, cache.page_size, 0.0, scores, heads=heads)
    params = _params(batch, cache, heads, scores, None, 0, limits, counts, counters)
    compiled.launch((1, num_kv_heads, batch.num_tokens), params, shared_bytes)
    return counts


def _shape_of(batch: DecodeBatch, cache: KVCache, warps: int) -> dict[str, int]:
    """Returns the constants of both kernels."""
    return {
        "QUERY": FORMATS[batch.query.dtype],
        "KV": FORMATS[cache.keys.view.dtype],
        "GROUP": batch.group_size(cache.num_kv_heads),
        "HEAD_SIZE": batch.head_size,
        "WARPS": warps,
    }


def _params(
    batch: DecodeBatch,
    cache: KVCache,
    heads: HeadWeights,
    scores: torch.Tensor,
    masses: torch.Tensor | None,
    kept_pages: int,
    limits: Limits,
    counts: torch.Tensor,
    counters: torch.Tensor | None,
) -> CountParams:
    """Returns the argument of both kernels."""
    assert cache.statistics is not None
    return CountParams(
        QueryParams.of(batch.query), CacheParams.of(cache), StatisticsParams.of(cache.statistics, 0.0),
        ContextParams.of(batch), heads.params(), pointer(scores), pointer(masses), pointer(limits.share),
        pointer(limits.least), pointer(limits.most), pointer(counts), pointer(counters), scores.stride(1), kept_pages,
        heads.sums.shape[3], launch_of(cache.statistics).chunk, cache.page_size, cache.keys.pages_per_block,
    )  # fmt: skip


def _count(
    batch: DecodeBatch,
    cache: KVCache,
    scores: torch.Tensor,
    writes_scores: bool,
    selection: PageSelection,
    softmax: Softmax,
    limits: Limits,
    counters: torch.Tensor | None,
) -> torch.Tensor:
    """Counts pages for rows `[num_tokens, num_kv_heads]`, and writes their scores if `writes_scores`."""
    queries, num_kv_heads, width = batch.tokens_per_request, cache.num_kv_heads, scores.shape[2]
    group_size, device = batch.group_size(num_kv_heads), scores.device
    counts = torch.empty((batch.num_tokens, num_kv_heads), dtype=torch.int32, device=device)
    at_once = requests_at_once(width, group_size, num_kv_heads * queries)
    cluster = cluster_of(min(at_once, batch.num_requests) * queries * num_kv_heads, width, _LEAST_PAGES, device)
    kept_pages = kept_pages_of(width, cluster, group_size, torch.cuda.get_device_capability(device))
    macros = {
        **_shape_of(batch, cache, WARPS),
        "CLUSTER": cluster,
        "SHARED_BYTES": fixed_bytes(cluster, group_size),
    }
    compiled = kernel(_ALL, device, macros, 32 * WARPS, "count_pages")
    compiled.reserve_shared(kept_bytes(kept_pages))
    statistics = cache.statistics
    assert statistics is not None
    for first in range(0, batch.num_requests, at_once):
        part, asked = batch.requests(first, first + at_once), limits[first : first + at_once]
        rows = slice(first * queries, first * queries + part.num_tokens)
        of_part = scores[rows]
        written = of_part if writes_scores else torch.empty_like(of_part)
        heads = HeadWeights.empty(part, statistics, width, softmax, selection)
        masses = None if kept_pages else torch.empty(of_part.shape, dtype=torch.int32, device=device)
        launch_scores(part, statistics, cache.page_size, 0.0, written, heads=heads)
        params = _params(part, cache, heads, of_part, masses, kept_pages, asked, counts[rows], counters)
        compiled.launch((cluster, num_kv_heads, part.num_tokens), params, kept_bytes(kept_pages))
    return counts
