"""Counts the pages of a coverage on a GPU.

The logits of all pages come first, many programs to a row; then a program of each row adds them up, the masses follow
from the sums, and another program of each row bisects the scores for the least that the pages above it reach the
target with. No length is read on the host, sums are taken in one order whatever the batch, and rows that have nothing
to count leave at once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import DecodeBatch, PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_coverage.rule import Coverage

_PAGES = tl.constexpr(64)
"""Pages whose records a program meets with the queries."""
_MANY = tl.constexpr(1024)
"""Pages of which a program reads numbers at a time."""
_TOKENS = tl.constexpr(32)
"""Known tokens whose keys a program reads at a time."""
_SCRATCH_BYTES = 1 << 28
"""Memory, at most, for the logits and masses of a batch's pages; one that needs more is counted in parts."""


@triton.jit
def _row_of(lengths_ptr, share_ptr, least_ptr, most_ptr, row, num_kv_heads, tokens_per_request, page_size):
    """Returns request, context, complete pages and whether there is something to count."""
    token = row // num_kv_heads
    request = token // tokens_per_request
    context = tl.load(lengths_ptr + request) - (tokens_per_request - 1 - token % tokens_per_request)
    num_pages = tl.maximum(context, 0) // page_size
    least, share = tl.load(least_ptr + request), tl.load(share_ptr + request)
    counts = (num_pages > least) & (least < tl.load(most_ptr + request)) & (share < 1)
    return request.to(tl.int64), context, num_pages, counts


@triton.jit
def _capped(logits, softcap, HAS_SOFTCAP: tl.constexpr):
    if HAS_SOFTCAP:
        logits = softcap * (2 * tl.sigmoid(2 * logits / softcap) - 1)
    return logits


@triton.jit
def _page_logits(
    query_ptr,
    vectors_ptr,
    steps_ptr,
    table_ptr,
    lengths_ptr,
    share_ptr,
    least_ptr,
    most_ptr,
    logits_ptr,
    vectors_strides,
    steps_strides,
    table_stride,
    width,
    factor,
    softcap,
    num_kv_heads,
    tokens_per_request,
    page_size,
    FEATURES: tl.constexpr,
    VECTORS: tl.constexpr,
    BITS: tl.constexpr,
    DROPPED: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    row = tl.program_id(0)
    request, _, num_pages, counts = _row_of(
        lengths_ptr, share_ptr, least_ptr, most_ptr, row, num_kv_heads, tokens_per_request, page_size
    )
    first = tl.program_id(1) * _PAGES
    if (not counts) | (first >= num_pages):
        return
    head = (row % num_kv_heads).to(tl.int64)
    page = first + tl.arange(0, _PAGES)
    exists = page < num_pages
    block = tl.load(table_ptr + request * table_stride + page // PAGES_PER_BLOCK, mask=exists, other=0).to(tl.int64)
    within = page % PAGES_PER_BLOCK
    record = vectors_ptr + block * vectors_strides[0] + head * vectors_strides[1] + within * vectors_strides[2]
    steps = steps_ptr + block * steps_strides[0] + head * steps_strides[1] + within * steps_strides[2]
    dim = tl.arange(0, DIMS)
    kept = (dim >= DROPPED) & (dim < HEAD_SIZE)
    for g in range(GROUP):
        head_row = row.to(tl.int64) * GROUP + g
        query = tl.load(query_ptr + head_row * HEAD_SIZE + dim, mask=dim < HEAD_SIZE, other=0.0)
        features = tl.where(kept, FEATURES(query, 0.0)[0], 0.0)
        best = tl.full((_PAGES,), float("-inf"), tl.float32)
        for v in tl.static_range(VECTORS):
            # A byte of codes holds dimension d of several vectors, the first in its lowest bits.
            place = record[:, None] + v * BITS // 8 * HEAD_SIZE + dim[None, :]
            packed = tl.load(place, mask=exists[:, None] & kept[None, :], other=0).to(tl.int32)
            code = ((packed >> (v * BITS % 8)) & ((1 << BITS) - 1)).to(tl.float32) - ((1 << BITS) - 1) / 2
            product = tl.sum(code * features[None, :], axis=1)
            step = tl.load(steps + v * BITS // 8 * steps_strides[3], mask=exists, other=0.0).to(tl.float32)
            best = tl.maximum(best, product * step)
        logits = _capped(best * factor, softcap, HAS_SOFTCAP)
        tl.store(logits_ptr + head_row * width + page, logits, mask=exists)


@triton.jit
def _add_up(
    query_ptr,
    keys_ptr,
    table_ptr,
    lengths_ptr,
    share_ptr,
    least_ptr,
    most_ptr,
    logits_ptr,
    sums_ptr,
    known_ptr,
    keys_strides,
    table_stride,
    width,
    factor,
    softcap,
    log_page,
    sink_pages,
    recent_pages,
    num_kv_heads,
    tokens_per_request,
    page_size,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    row = tl.program_id(0)
    request, context, num_pages, counts = _row_of(
        lengths_ptr, share_ptr, least_ptr, most_ptr, row, num_kv_heads, tokens_per_request, page_size
    )
    if not counts:
        return
    head = (row % num_kv_heads).to(tl.int64)
    dim = tl.arange(0, DIMS)
    real = dim < HEAD_SIZE
    known_tokens = (sink_pages + recent_pages) * page_size + context % page_size
    known_share = 0.0
    for g in range(GROUP):
        head_row = row.to(tl.int64) * GROUP + g
        query = tl.load(query_ptr + head_row * HEAD_SIZE + dim, mask=real, other=0.0)
        # The sink pages, the newest ones and the incomplete one, token by token.
        # It is below all logits, and finite: sums may start from it.
        largest, total = -1.0e30, 0.0
        for start in range(0, known_tokens, _TOKENS):
            slot = start + tl.arange(0, _TOKENS)
            exists = slot < known_tokens
            of_sinks = slot < sink_pages * page_size
            token = tl.where(of_sinks, slot, slot + (num_pages - sink_pages - recent_pages) * page_size)
            at = token // page_size // PAGES_PER_BLOCK
            block = tl.load(table_ptr + request * table_stride + at, mask=exists, other=0).to(tl.int64)
            inside = token - at * (PAGES_PER_BLOCK * page_size)
            place = keys_ptr + block * keys_strides[0] + head * keys_strides[1] + inside * keys_strides[2]
            keys = tl.load(place[:, None] + dim[None, :], mask=exists[:, None] & real[None, :], other=0.0)
            products = tl.sum(keys.to(tl.float32) * query[None, :], axis=1)
            logits = tl.where(exists, _capped(products * factor, softcap, HAS_SOFTCAP), float("-inf"))
            base = tl.maximum(largest, tl.max(logits, axis=0))
            total = total * tl.exp(largest - base) + tl.sum(tl.exp(logits - base), axis=0)
            largest = base
        known_largest, known_total = largest, total
        for start in range(0, num_pages, _MANY):
            page = start + tl.arange(0, _MANY)
            counted = (page >= sink_pages) & (page < num_pages - recent_pages)
            logits = tl.load(logits_ptr + head_row * width + page, mask=counted, other=float("-inf")) + log_page
            base = tl.maximum(largest, tl.max(logits, axis=0))
            total = total * tl.exp(largest - base) + tl.sum(tl.exp(logits - base), axis=0)
            largest = base
        tl.store(sums_ptr + head_row, largest + tl.log(total))
        known_share += known_total * tl.exp(known_largest - largest) / total
    tl.store(known_ptr + row, known_share / GROUP)


@triton.jit
def _weigh(
    lengths_ptr,
    share_ptr,
    least_ptr,
    most_ptr,
    logits_ptr,
    sums_ptr,
    masses_ptr,
    width,
    log_page,
    num_kv_heads,
    tokens_per_request,
    page_size,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0)
    _, _, num_pages, counts = _row_of(
        lengths_ptr, share_ptr, least_ptr, most_ptr, row, num_kv_heads, tokens_per_request, page_size
    )
    first = tl.program_id(1) * _MANY
    if (not counts) | (first >= num_pages):
        return
    page = first + tl.arange(0, _MANY)
    exists = page < num_pages
    mass = tl.zeros((_MANY,), tl.float32)
    for g in range(GROUP):
        head_row = row.to(tl.int64) * GROUP + g
        logits = tl.load(logits_ptr + head_row * width + page, mask=exists, other=float("-inf")) + log_page
        mass += tl.exp(logits - tl.load(sums_ptr + head_row))
    tl.store(masses_ptr + row.to(tl.int64) * width + page, mass / GROUP, mask=exists)


@triton.jit
def _keys_and_masses(scores_ptr, masses_ptr, start, num_pages, sink_pages, recent_pages):
    """Returns what orders pages like their scores, -1 for those that are not chosen by them, and their masses."""
    page = start + tl.arange(0, _MANY)
    chosen = (page >= sink_pages) & (page < num_pages - recent_pages)
    score = tl.load(scores_ptr + page, mask=chosen, other=0.0)
    bits = score.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    # NaN ranks like -inf, -0 like 0.
    bits = tl.where((bits & 0x7FFF) > 0x7F80, 0xFF80, bits)
    bits = tl.where(bits == 0x8000, 0, bits)
    key = tl.where(bits >= 0x8000, bits ^ 0xFFFF, bits | 0x8000)
    return tl.where(chosen, key, -1), tl.load(masses_ptr + page, mask=chosen, other=0.0)


@triton.jit
def _count(
    scores_ptr,
    masses_ptr,
    known_ptr,
    lengths_ptr,
    share_ptr,
    least_ptr,
    most_ptr,
    counts_ptr,
    dense_ptr,
    counters_ptr,
    dense_tokens,
    scores_stride,
    width,
    sink_pages,
    recent_pages,
    num_kv_heads,
    tokens_per_request,
    page_size,
):
    row = tl.program_id(0)
    request, context, num_pages, counts = _row_of(
        lengths_ptr, share_ptr, least_ptr, most_ptr, row, num_kv_heads, tokens_per_request, page_size
    )
    least, most = tl.load(least_ptr + request), tl.load(most_ptr + request)
    share = tl.load(share_ptr + request)
    missing = share
    if counts:
        missing -= tl.load(known_ptr + row)
    scores_ptr += row.to(tl.int64) * scores_stride
    masses_ptr += row.to(tl.int64) * width
    found = 0
    if counts & (missing > 0):
        threshold = 0
        for bit in range(16):
            tried = threshold | (0x8000 >> bit)
            reached = 0.0
            for start in range(0, num_pages, _MANY):
                key, mass = _keys_and_masses(scores_ptr, masses_ptr, start, num_pages, sink_pages, recent_pages)
                reached += tl.sum(tl.where(key >= tried, mass, 0.0), axis=0)
            threshold = tl.where(reached >= missing, tried, threshold)
        above = 0.0
        for start in range(0, num_pages, _MANY):
            key, mass = _keys_and_masses(scores_ptr, masses_ptr, start, num_pages, sink_pages, recent_pages)
            above += tl.sum(tl.where(key > threshold, mass, 0.0), axis=0)
            found += tl.sum((key > threshold).to(tl.int32), axis=0)
        # Of the pages with this score the first, until the target is reached.
        equal, needed = 0, 1
        for start in range(0, num_pages, _MANY):
            key, mass = _keys_and_masses(scores_ptr, masses_ptr, start, num_pages, sink_pages, recent_pages)
            of_equal = tl.where(key == threshold, mass, 0.0)
            short = (key == threshold) & (above + tl.cumsum(of_equal, axis=0) < missing)
            needed += tl.sum(short.to(tl.int32), axis=0)
            equal += tl.sum((key == threshold).to(tl.int32), axis=0)
            above += tl.sum(of_equal, axis=0)
        found += tl.minimum(needed, equal) + sink_pages + recent_pages
    found = tl.where(share < 1, found, num_pages)
    read = tl.maximum(least, tl.minimum(found, tl.minimum(most, num_pages)))
    tl.store(counts_ptr + row, read)
    if counters_ptr is not None:
        whole = (context <= dense_tokens) | (num_pages <= least)
        if dense_ptr is not None:
            whole = whole | (tl.load(dense_ptr + request) != 0)
        if not whole:
            # What `stopping.count_reads` says of the row, in blocks of a page.
            of_head = counters_ptr + row % num_kv_heads * 4
            tl.atomic_add(of_head, 1)
            tl.atomic_add(of_head + 1, read.to(tl.int64))
            tl.atomic_add(of_head + 2, read.to(tl.int64) * page_size + context % page_size)
            tl.atomic_add(of_head + 3, context.to(tl.int64))


def count_rows(
    batch: DecodeBatch,
    cache: KVCache,
    scores: torch.Tensor,
    selection: PageSelection,
    softmax: Softmax,
    coverage: Coverage,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Counts pages for the query tokens of decoding requests; see `api.count_rows`.

    Args:
        batch: the requests, with queries of 16 bits.
        cache: keys in 16 bits, one contiguous row per token, and statistics.
        scores: `[num_tokens, num_kv_heads, pages]` bfloat16, rows of one stride.
        selection: the pages that are always read.
        softmax: how logits become weights.
        coverage: the target and the limits of each request.
        counters: see `api.count_rows`.

    Returns:
        `[num_tokens, num_kv_heads]` int32.
    """
    width, queries = batch.block_table.shape[1] * cache.keys.pages_per_block, batch.tokens_per_request
    request_bytes = 4 * width * (batch.group_size(cache.num_kv_heads) + 1) * cache.num_kv_heads * queries
    at_once = max(1, _SCRATCH_BYTES // request_bytes)
    parts = [
        _count_part(
            batch.requests(first, first + at_once), cache, scores[first * queries : (first + at_once) * queries],
            selection, softmax, coverage[first : first + at_once], counters,
        )
        for first in range(0, batch.num_requests, at_once)
    ]  # fmt: skip
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def row_page_logits(token: QueryTokens, cache: KVCache, num_pages: int, softmax: Softmax) -> torch.Tensor:
    """See `api.row_page_logits`; the query has 16 bits."""
    device = token.query.device
    # Nothing is covered: the limits that let a row of any length be counted.
    nothing = torch.zeros(1, device=device)
    limits = token.context_lens, nothing, nothing, nothing + 1
    # Triton compiles a kernel for multiples of 16 and one for other numbers: contexts of all lengths have the first.
    width = triton.cdiv(num_pages, 16) * 16
    table = token.block_table.contiguous()
    logits = _launch_page_logits(token.query, table, 0, limits, cache, softmax, width, tokens_per_request=1)
    return logits[..., :num_pages] + math.log(cache.page_size)


def _launch_page_logits(
    query: torch.Tensor,
    table: torch.Tensor,
    table_stride: int,
    limits: tuple[torch.Tensor, ...],
    cache: KVCache,
    softmax: Softmax,
    width: int,
    tokens_per_request: int,
) -> torch.Tensor:
    """Returns the logits of the pages that are to be counted, the page's tokens not yet among them.

    Args:
        query: `[num_tokens, num_kv_heads, group_size, head_size]`.
        table: block tables of the requests.
        table_stride: elements from one of them to the next.
        limits: contexts, and the three of a coverage, of each request.
        cache: statistics.
        softmax: how products become logits.
        width: pages that there is room for.
        tokens_per_request: query tokens of each.

    Returns:
        `[num_tokens * num_kv_heads, group_size, width]` float32; nothing is written for other pages.
    """
    statistics, (num_tokens, num_kv_heads, group_size, head_size) = cache.statistics, query.shape
    assert statistics is not None
    assert statistics.scales is not None
    codes = statistics.kind.codes
    assert codes is not None
    rows = num_tokens * num_kv_heads
    logits = torch.empty((rows, group_size, width), dtype=torch.float32, device=query.device)
    _page_logits[(rows, triton.cdiv(width, _PAGES.value))](
        query.float().contiguous(), statistics.vectors, statistics.scales, table, *limits, logits,
        statistics.vectors.stride(), statistics.scales.stride(), table_stride, width, float(softmax.scale),
        float(softmax.softcap), num_kv_heads, tokens_per_request, cache.page_size,
        FEATURES=statistics.kind.triton_features, VECTORS=statistics.kind.vectors, BITS=codes.bits,
        DROPPED=codes.dropped, GROUP=group_size, HEAD_SIZE=head_size, DIMS=triton.next_power_of_2(head_size),
        PAGES_PER_BLOCK=cache.keys.pages_per_block, HAS_SOFTCAP=softmax.softcap > 0,
    )  # fmt: skip
    return logits


def _count_part(
    batch: DecodeBatch,
    cache: KVCache,
    scores: torch.Tensor,
    selection: PageSelection,
    softmax: Softmax,
    coverage: Coverage,
    counters: torch.Tensor | None,
) -> torch.Tensor:
    keys, num_kv_heads = cache.keys.view, cache.num_kv_heads
    rows, group_size, head_size = batch.num_tokens * num_kv_heads, batch.group_size(num_kv_heads), batch.head_size
    width, device = batch.block_table.shape[1] * cache.keys.pages_per_block, scores.device
    query = batch.query.unflatten(1, (num_kv_heads, group_size)).float().contiguous()
    sums = torch.empty((rows, group_size), dtype=torch.float32, device=device)
    known = torch.empty(rows, dtype=torch.float32, device=device)
    masses = torch.empty((rows, width), dtype=torch.float32, device=device)
    counts = torch.empty((batch.num_tokens, num_kv_heads), dtype=torch.int32, device=device)
    limits = batch.seq_lens, coverage.share, coverage.least, coverage.most
    place = num_kv_heads, batch.tokens_per_request, cache.page_size
    always, log_page = (selection.sink_pages, selection.recent_pages), math.log(cache.page_size)
    shape = {
        "GROUP": group_size,
        "HEAD_SIZE": head_size,
        "DIMS": triton.next_power_of_2(head_size),
        "PAGES_PER_BLOCK": cache.keys.pages_per_block,
        "HAS_SOFTCAP": softmax.softcap > 0,
    }
    logits = _launch_page_logits(
        query, batch.block_table, batch.block_table.stride(0), limits, cache, softmax, width, batch.tokens_per_request
    )
    _add_up[(rows,)](
        query, keys, batch.block_table, *limits, logits, sums, known,
        (keys.stride(0), keys.stride(1), keys.stride(-2)), batch.block_table.stride(0), width,
        float(softmax.scale), float(softmax.softcap), log_page, *always, *place, **shape,
    )  # fmt: skip
    _weigh[(rows, triton.cdiv(width, _MANY.value))](
        *limits, logits, sums, masses, width, log_page, *place, GROUP=group_size
    )
    dense = None if batch.dense_requests is None else batch.dense_requests.view(torch.uint8)
    _count[(rows,)](
        scores, masses, known, *limits, counts, dense, counters, batch.dense_tokens, scores.stride(1), width, *always,
        *place,
    )  # fmt: skip
    return counts


def count_pages(
    tokens: QueryTokens,
    cache: KVCache,
    scores: torch.Tensor,
    selection: PageSelection,
    softmax: Softmax,
    coverage: Coverage,
) -> torch.Tensor:
    """See `api.count_pages`."""
    batch = DecodeBatch(tokens.query.flatten(1, 2), tokens.block_table.int(), tokens.context_lens.int())
    return count_rows(batch, cache, scores.contiguous(), selection, softmax, coverage).long()
