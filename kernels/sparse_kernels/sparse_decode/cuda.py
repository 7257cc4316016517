"""The decode step on CUDA.

One launch routes, scores, selects and attends. A row is a query token and a KV head. With few rows, launches and their
latency are most of the cost, and a row has a cluster of thread blocks. With many rows, a row has one thread block.
Scores have their own launch before compute capability 9.0, which has no clusters, and for the kinds of statistics that
`page_score.triton` scores.

Other shapes take several launches. Long contexts get candidates from a launch before (`candidates`), or all scores and
the selection if a thread block cannot number their pages. Large budgets and large groups are attended in pieces, which
another launch adds up. All thread blocks of a launch share the long dense contexts (`whole.cuh`).

A launch reads `batch.pages` like the selection of another launch. A launch that writes its selection is compiled
separately, so that other launches have no such code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.cuda.launch import FORMATS, kernel
from sparse_kernels.cuda.params import (
    CacheParams,
    ContextParams,
    HotParams,
    OutputParams,
    QueryParams,
    RoutingParams,
    SelectionParams,
    SoftmaxParams,
    StatisticsParams,
    StopParams,
    WholeParams,
    pointer,
    struct_of,
)
from sparse_kernels.group_routing.cuda import skipped_groups
from sparse_kernels.limits import MAX_K, MAX_PAGES, DecodeShape
from sparse_kernels.page_lists import attended_pages, chosen_pages
from sparse_kernels.page_score.cuda import format_of, launch_scores
from sparse_kernels.page_score.levels import in_units
from sparse_kernels.page_topk.cuda import list_pages, select_pages
from sparse_kernels.rules import GroupRouting, StopRule
from sparse_kernels.sparse_decode.candidates import find_candidates
from sparse_kernels.sparse_decode.launches import (
    MOST_FUSED,
    NO_CANDIDATES,
    Launch,
    fitting,
    fixed_bytes,
    in_pieces,
    launch_of,
    shared_bytes,
    values_bytes,
)
from sparse_kernels.sparse_decode.scratch import requests_in_pieces
from sparse_kernels.split_attention.cuda import Reading, attend_selection

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
    statistics, device = None if batch.pages is not None else cache.statistics, batch.query.device
    if cache.hot is not None and rule is not None:
        raise ValueError("cache.hot: got hot pages, allowed with a stop rule: None")
    if selection.k > MAX_K and (rule is not None or launch is not None):
        raise ValueError(f"k: got {selection.k}, allowed on CUDA with a rule or in one launch: up to {MAX_K}")
    max_pages = _max_pages(batch, cache)
    group_size = batch.group_size(cache.num_kv_heads)
    shape = DecodeShape(group_size, cache.head_size, max_pages, selection.k, rule is not None)
    capability = torch.cuda.get_device_capability(device)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    leveled = statistics is not None and statistics.kind.is_leveled
    if launch is None:
        if in_pieces(shape, capability):
            decode_in_pieces(batch, cache, softmax, selection, routing, output)
            return
        record_bytes = 0 if statistics is None else statistics.vector_bytes
        rows = batch.num_tokens * cache.num_kv_heads
        launch = launch_of(rows, shape, record_bytes, capability, leveled, multiprocessors)
        if routing is not None and launch.cluster > 1:
            # Routing would need a launch of its own before the one that finds candidates.
            launch = launch._replace(most_fused=max(launch.most_fused, MOST_FUSED))
    elif leveled:
        launch = launch._replace(most_fused=NO_CANDIDATES)
    if statistics is not None and not statistics.kind.is_fused:
        launch = fitting(launch._replace(fused=False), shape, capability)
    if batch.pages is not None:
        launch = launch._replace(fused=False, listed=True)
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
        "LISTED": int(launch.listed),
        "GIVEN": int(batch.pages is not None),
        "WRITTEN": int(output.pages is not None),
        "CLUSTER": launch.cluster,
        "WARPS": launch.warps,
        "BLOCKS_PER_SM": launch.blocks_per_sm,
        "HOT": int(cache.hot is not None),
        "STOP_TILES": rule.block_tokens // 8 if rule else 0,
        "FIXED_BYTES": fixed_bytes(launch, shape),
        "VALUES_BYTES": values_bytes(launch, shape),
    }
    compiled = kernel(_SOURCE, device, macros, 32 * launch.warps)
    block_bytes = shared_bytes(launch, shape)
    compiled.reserve_shared(block_bytes, launch.blocks_per_sm)
    scores, pages, candidates = None, batch.pages, struct_of("CandidateParams")()
    if statistics is not None and launch.candidates(shape):
        found = find_candidates(batch, cache, selection, routing, launch, shape)
        candidates = found.params(launch)
    elif statistics is not None and not launch.fused:
        skipped = None if routing is None else skipped_groups(batch, cache, routing)
        scores = _scores(batch, cache, selection, skipped, max_pages)
        if launch.listed:
            lengths = batch.num_pages(cache.page_size)
            always = selection.sink_pages, selection.recent_pages
            pages, _ = select_pages(scores, lengths, selection.k, *always, budgets=batch.token_budgets())
            scores = None
    params = struct_of("DecodeParams")(
        query=QueryParams.of(batch.query, batch.query_scale),
        cache=CacheParams.of(cache),
        statistics=StatisticsParams.of(statistics, selection.std_weight, in_units(selection.refined)),
        scores=pointer(scores),
        scores_stride=0 if scores is None else scores.stride(1),
        contexts=ContextParams.of(batch),
        selection=SelectionParams.of(selection, batch.budgets),
        routing=RoutingParams.of(routing),
        softmax=SoftmaxParams.of(softmax),
        stop=StopParams.of(rule),
        output=OutputParams.of(output),
        pages=pointer(pages),
        chosen=pointer(output.pages),
        whole=WholeParams.of(batch, cache.num_kv_heads),
        num_tokens=batch.num_tokens,
        candidates=candidates,
        hot=HotParams.of(cache),
    )
    grid = launch.cluster, cache.num_kv_heads, batch.num_tokens
    if batch.whole is not None:
        # Multiprocessors without a row take stripes of dense contexts.
        room = launch.blocks_per_sm * multiprocessors - math.prod(grid)
        grid = grid[0], grid[1], batch.num_tokens + max(0, room // (launch.cluster * cache.num_kv_heads))
    compiled.launch(grid, params, block_bytes)


def decode_in_pieces(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    selection: PageSelection,
    routing: GroupRouting | None,
    output: DecodeOutput,
) -> None:
    """Runs a decode step as separate launches to route, score, select, attend and add up. It serves any budget, context
    and group.

    The bits of a token's output depend on that token alone, but differ from those of one launch.
    """
    max_pages = _max_pages(batch, cache)
    for part, room in _requests_at_once(batch, cache, selection, max_pages, output):
        skipped = None if routing is None else skipped_groups(part, cache, routing, counts=True)
        pages = None
        if part.pages is not None:
            part, pages = _without_gaps(part, cache.page_size)
        elif cache.statistics is not None:
            scores = _scores(part, cache, selection, skipped, max_pages)
            pages = list_pages(scores, part, cache.page_size, selection, skipped)
        if room.pages is not None:
            room.pages.copy_(_selected(part, cache.page_size, selection, skipped, pages))
        reading = Reading(skipped=skipped, selection=selection, pages=pages)
        attend_selection(part, cache, softmax, reading, room)


def _without_gaps(batch: DecodeBatch, page_size: int) -> tuple[DecodeBatch, torch.Tensor]:
    """Moves the pages of each list to its front, and makes their number the budget of the row.

    A row within its budget keeps the budget, because it attends densely for that reason.
    """
    assert batch.pages is not None
    num_pages, budgets = batch.num_pages(page_size), _budgets(batch, batch.pages.shape[2])
    pages = attended_pages(batch.pages, num_pages, budgets)
    counts = (pages >= 0).sum(dim=-1, dtype=torch.int32)
    counts = torch.where(num_pages[:, None] <= budgets, budgets, counts)
    return replace(batch, budgets=counts), pages.int()


def _selected(
    batch: DecodeBatch,
    page_size: int,
    selection: PageSelection,
    skipped: torch.Tensor | None,
    pages: torch.Tensor | None,
) -> torch.Tensor:
    """Returns a selection in the form of `DecodeOutput.pages`. Without `pages`, rows read the sink pages and the newest
    pages."""
    num_pages, budgets, unselected = batch.num_pages(page_size), _budgets(batch, selection.k), batch.is_dense()[:, None]
    if skipped is not None:
        unselected = unselected | skipped.bool()
    if pages is None:
        slot = torch.arange(selection.k, device=num_pages.device)
        newest = (num_pages[:, None] - budgets)[..., None] + slot
        pages = torch.where(slot < selection.sink_pages, slot, newest)
    return chosen_pages(pages, num_pages, selection.k, budgets).masked_fill(unselected[..., None], -1)


def _budgets(batch: DecodeBatch, k: int) -> torch.Tensor:
    """Returns the most pages that each token reads: int32 that broadcasts to `[num_tokens, num_kv_heads]`."""
    budgets = batch.token_budgets()
    if budgets is None:
        return torch.full((1, 1), k, dtype=torch.int32, device=batch.query.device)
    return budgets[:, None].clamp(max=k)


def _max_pages(batch: DecodeBatch, cache: KVCache) -> int:
    """Returns the most complete pages of a context."""
    room = batch.block_table.shape[1] * cache.keys.pages_per_block
    if batch.max_context is None:
        return room
    # A block table may have room beyond the longest context, and one more page may need more launches.
    return min(room, max(MAX_PAGES, batch.max_context // cache.page_size))


def _requests_at_once(
    batch: DecodeBatch, cache: KVCache, selection: PageSelection, max_pages: int, output: DecodeOutput
) -> Iterator[tuple[DecodeBatch, DecodeOutput]]:
    """Yields the batch in parts whose scores, pages and pieces need at most `PIECES_BYTES` of memory."""
    tokens = batch.tokens_per_request
    shape = DecodeShape(batch.group_size(cache.num_kv_heads), cache.head_size, max_pages, selection.k)
    at_once = requests_in_pieces(shape, cache.num_kv_heads * tokens)
    for first in range(0, batch.num_requests, at_once):
        last = min(first + at_once, batch.num_requests)
        yield batch.requests(first, last), output.tokens(first * tokens, last * tokens)


def _scores(
    batch: DecodeBatch, cache: KVCache, selection: PageSelection, skipped: torch.Tensor | None, max_pages: int
) -> torch.Tensor:
    """Returns the scores of all pages, from a launch that leaves out skipped groups."""
    assert cache.statistics is not None
    shape = batch.num_tokens, cache.num_kv_heads, -(-max_pages // 8) * 8
    scores = torch.empty(shape, dtype=torch.bfloat16, device=batch.query.device)
    launch_scores(
        batch, cache.statistics, cache.page_size, selection.std_weight, scores, skipped, refined=selection.refined
    )
    return scores
