"""Selects the exact top k on CUDA. A block holds a row in its registers; longer rows go through segments first.

Where k is too large for a block to rank, the blocks of a cluster list the best pages in the order of the text.
"""

from __future__ import annotations

from pathlib import Path

import torch

from sparse_kernels.batch import DecodeBatch, PageSelection
from sparse_kernels.cuda.launch import cluster_of, kernel
from sparse_kernels.cuda.params import ContextParams, SelectionParams, pointer, score_rows, struct_of
from sparse_kernels.limits import MAX_K
from sparse_kernels.page_topk.launches import Pass, passes_of

_SOURCE = Path(__file__).with_name("topk.cu")
_LIST = Path(__file__).with_name("list.cu")
_LIST_WARPS = 32
_LEAST_LISTED = 4096
"""Pages of a row, at least, to each block of a cluster that lists."""


def select_pages(
    scores: torch.Tensor,
    num_pages: torch.Tensor,
    k: int,
    sink_pages: int,
    recent_pages: int,
    segment: int | None = None,
    budgets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `api.select_pages`; also gives the counts, `[num_tokens, num_kv_heads]` int32.

    With `budgets`, `[num_tokens]` int32 of at most k, every token has a number of its own; k is then at most 1,024.
    """
    num_tokens, num_kv_heads, width = scores.shape
    scores = score_rows(scores)
    lengths, selection = num_pages.int(), PageSelection(k, sink_pages, recent_pages)
    if k > MAX_K:
        # No length is that of a context which is attended whole.
        contexts = ContextParams(
            block_table=None, seq_lens=pointer(lengths), dense_requests=None, table_stride=0, tokens_per_request=1,
            dense_tokens=-1,
        )  # fmt: skip
        if budgets is not None:
            raise ValueError(f"budgets: got some and k {k}, allowed: k up to {MAX_K}")
        listed = _list(scores, contexts, 0, SelectionParams.of(selection, None), None)
        return listed, lengths.clamp(max=k)[:, None].expand(-1, num_kv_heads)
    rows = num_tokens * num_kv_heads
    multiprocessors = torch.cuda.get_device_properties(scores.device).multi_processor_count
    pages = torch.empty((num_tokens, num_kv_heads, k), dtype=torch.int32, device=scores.device)
    counts = torch.empty((num_tokens, num_kv_heads), dtype=torch.int32, device=scores.device)

    def launch(a_pass: Pass, candidates: torch.Tensor | None, out: torch.Tensor) -> None:
        warps, size = a_pass.launch.warps, a_pass.size
        macros = {
            "WARPS": warps,
            "PER_THREAD": a_pass.launch.per_thread,
            "CANDIDATES": int(candidates is not None),
        }
        compiled = kernel(_SOURCE, scores.device, macros, 32 * warps)
        compiled.reserve_shared(a_pass.dynamic_bytes)
        params = struct_of("TopkParams")(
            scores=pointer(scores), num_pages=pointer(lengths), candidates=pointer(candidates),
            pages=pointer(out), counts=pointer(counts), scores_stride=scores.stride(1), row_stride=out.stride(0),
            segment_stride=out.stride(1), selection=SelectionParams.of(selection, budgets), segment=size,
            width=scores.shape[2], num_candidates=0 if candidates is None else size,
        )  # fmt: skip
        compiled.launch((a_pass.segments, num_kv_heads, num_tokens), params, a_pass.dynamic_bytes)

    capability = torch.cuda.get_device_capability(scores.device)
    first, *second = passes_of(width, k, rows > multiprocessors, capability, segment)
    if not second:
        launch(first, None, pages.view(rows, 1, k))
        return pages, counts
    candidates = torch.empty((rows, first.segments, k), dtype=torch.int32, device=scores.device)
    launch(first, None, candidates)
    launch(second[0], candidates, pages.view(rows, 1, k))
    return pages, counts


def list_pages(
    scores: torch.Tensor,
    batch: DecodeBatch,
    page_size: int,
    selection: PageSelection,
    skipped: torch.Tensor | None = None,
    cluster: int | None = None,
) -> torch.Tensor:
    """Lists the best pages of decoding tokens, in the order of the text.

    Args:
        scores: `[num_tokens, num_kv_heads, max_pages]` bfloat16, contiguous, a multiple of eight pages.
        batch: the requests that decode.
        page_size: tokens per page.
        selection: how many pages, and which whatever their scores.
        skipped: `[num_tokens, num_kv_heads]` uint8, 1 for rows that need no list.
        cluster: blocks that share a row; by default what fills the GPU. No list depends on it.

    Returns:
        `[num_tokens, num_kv_heads, k]` int32, -1 where a row has fewer pages than it reads; nothing is written for
        skipped rows, for contexts that are attended whole, and behind the pages of a budget.
    """
    params = SelectionParams.of(selection, batch.budgets)
    return _list(scores, ContextParams.of(batch), page_size, params, skipped, cluster)


def _list(
    scores: torch.Tensor,
    contexts: ContextParams,
    page_size: int,
    selection: SelectionParams,
    skipped: torch.Tensor | None,
    cluster: int | None = None,
) -> torch.Tensor:
    num_tokens, num_kv_heads, width = scores.shape
    cluster = cluster or cluster_of(num_tokens * num_kv_heads, width, _LEAST_LISTED, scores.device)
    pages = torch.empty((num_tokens, num_kv_heads, selection.k), dtype=torch.int32, device=scores.device)
    macros = {"CLUSTER": cluster, "WARPS": _LIST_WARPS}
    compiled = kernel(_LIST, scores.device, macros, 32 * _LIST_WARPS, "list_pages")
    params = struct_of("ListParams")(
        scores=pointer(scores), skipped=pointer(skipped), pages=pointer(pages), scores_stride=scores.stride(1),
        contexts=contexts, selection=selection, page_size=page_size,
    )  # fmt: skip
    compiled.launch((cluster, num_kv_heads, num_tokens), params)
    return pages
