"""Entry point of the page-coverage operation."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparse_kernels.batch import DecodeBatch, PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_coverage import reference
from sparse_kernels.page_coverage.estimate import page_logits
from sparse_kernels.page_coverage.rule import Limits
from sparse_kernels.page_score import score_pages
from sparse_kernels.stopping import count_reads

_PIECE_PAGES = 2048
"""Pages whose records torch copies at once, which bounds the memory of the copy."""


def count_pages(
    tokens: QueryTokens,
    cache: KVCache,
    scores: torch.Tensor,
    selection: PageSelection,
    softmax: Softmax,
    limits: Limits,
) -> torch.Tensor:
    """Counts the best pages that carry a share of the attention weight, as the page statistics estimate it.

    The estimate treats all B keys of a page as the best matching of its record's keys x_1..x_V, as in sparse prefill.
    A mean of keys underestimates the weight, the largest of several means overestimates it by about as much. The
    weights of pages that are always read and of the incomplete page are exact. For a query head q, e(x) = exp(s q . x),

        m_p = B max_j e(x_pj)        Z = sum over known tokens i of e(k_i) + sum over other pages p of m_p

    The share that is read is (Z - sum over unread p of m_p) / Z. Its mean over the heads of the group must reach the
    target. Pages are ranked as in `select_pages`: first those always read, then by descending score, ties to the lowest
    page. A softcap applies to the products. Learned sink logits do not count.

    Args:
        tokens: the query tokens.
        cache: keys and statistics, of a kind whose vectors are keys and that has no spread.
        scores: `[num_tokens, num_kv_heads, max_pages]` bfloat16, see `score_pages`.
        selection: the pages that are always read; `k` is ignored.
        softmax: how logits become weights.
        limits: the target share of each token, and how many pages it reads at least and at most.

    Returns:
        `[num_tokens, num_kv_heads]` int64 for `select_pages`. A row's number depends on that row alone.

    Raises:
        ValueError: if the shapes disagree, or for statistics without an estimate.
    """
    num_tokens, num_kv_heads = tokens.query.shape[:2]
    cache.check()
    tokens.check(cache.num_kv_heads, cache.head_size)
    statistics = cache.statistics
    if statistics is None or statistics.kind.codes is None:
        name = "none" if statistics is None else statistics.kind.name
        raise ValueError(f"statistics: got {name}, allowed: quarters or sketch")
    limits.check(num_tokens, selection.sink_pages + selection.recent_pages)
    if scores.shape[:2] != (num_tokens, num_kv_heads) or scores.dtype != torch.bfloat16:
        raise ValueError(
            f"scores: got {list(scores.shape)} {scores.dtype}, allowed: [{num_tokens}, {num_kv_heads}, pages] "
            "torch.bfloat16"
        )
    if num_tokens == 0:
        return limits.least[:, None].expand(0, num_kv_heads)
    implementation = reference.count_pages
    keys = cache.keys.view
    if keys.is_cuda and tokens.query.dtype.itemsize == keys.dtype.itemsize == 2:
        from sparse_kernels.page_coverage import cuda

        implementation = cuda.count_pages
    if keys.device.type == "cpu" and tokens.query.dtype == keys.dtype == torch.bfloat16:
        from sparse_kernels.page_coverage import cpu

        implementation = cpu.count_pages
    return implementation(tokens, cache, scores, selection, softmax, limits)


def count_rows(
    batch: DecodeBatch,
    cache: KVCache,
    selection: PageSelection,
    softmax: Softmax,
    limits: Limits,
    counters: torch.Tensor | None = None,
) -> DecodeBatch:
    """Scores the pages of decoding requests and counts them like `count_pages`, for `sparse_decode`.

    On a GPU the host reads no length, and a CUDA graph may hold the launches. A row's number depends on that row alone.

    Args:
        batch: the requests that decode, with 16-bit queries.
        cache: 16-bit keys, and statistics whose vectors are keys, without a spread.
        selection: the pages that are always read, and `k`, the most pages that any row reads.
        softmax: how logits become weights.
        limits: the limits of each request, `most` at most `k`; they are not checked.
        counters: `[num_kv_heads, 4]` int64. Rows with more pages than `limits.least` add the values of
            `stopping.count_reads`, unless they are attended whole. None to count nothing.

    Returns:
        The batch with `scores`, and with the counts as `budgets`, `[num_tokens, num_kv_heads]` int32.
    """
    batch.check(cache.num_kv_heads, cache.head_size)
    statistics, num_kv_heads, queries = cache.statistics, cache.num_kv_heads, batch.tokens_per_request
    assert statistics is not None
    if batch.query.is_cuda:
        from sparse_kernels.page_coverage import cuda

        return cuda.count_rows(batch, cache, selection, softmax, limits, counters)
    from_end = torch.arange(queries - 1, -1, -1)
    contexts = (batch.seq_lens.long()[:, None] - from_end).flatten().clamp(min=0)
    request = torch.arange(batch.num_requests).repeat_interleave(queries)
    tokens = QueryTokens(batch.query.unflatten(1, (num_kv_heads, -1)), batch.block_table.long()[request], contexts)
    num_pages = tokens.num_pages(cache.page_size)
    scored = score_pages(tokens.query, statistics, tokens.block_table, num_pages, 0.0)
    counts = count_pages(tokens, cache, scored, selection, softmax, limits[request])
    if counters is not None:
        is_dense = (contexts <= batch.dense_tokens) | (num_pages <= limits.least[request])
        if batch.dense_requests is not None:
            is_dense |= batch.dense_requests[request]
        reads = count_reads(counts, contexts, cache.page_size, cache.page_size)
        counters.add_((reads * ~is_dense[:, None, None]).sum(dim=0))
    return replace(batch, budgets=counts.int(), scores=scored)


def row_page_logits(token: QueryTokens, cache: KVCache, num_pages: int, softmax: Softmax) -> torch.Tensor | None:
    """Estimates what the pages of one context add to the denominator of its softmax, see `page_logits`.

    Args:
        token: the query token; its query has the dtype of the cache, or float32.
        cache: the statistics.
        num_pages: pages of whole blocks, at least as many as the context fills.
        softmax: how logits become weights.

    Returns:
        `[num_kv_heads, group_size, num_pages]` float32, undefined beyond the complete pages of the context; None for
        statistics whose vectors are not keys.
    """
    statistics = cache.statistics
    if statistics is None or statistics.kind.codes is None:
        return None
    if token.query.is_cuda and token.query.dtype.itemsize == 2:
        from sparse_kernels.page_coverage import cuda

        return cuda.row_page_logits(token, cache, num_pages, softmax)
    blocks = token.block_table[0, : num_pages // statistics.pages_per_block].long()
    pieces = blocks.split(max(_PIECE_PAGES // statistics.pages_per_block, 1))
    estimates = [
        page_logits(token.query[0], statistics.summaries(piece)[0], cache.page_size, softmax) for piece in pieces
    ]
    return torch.cat(estimates, dim=-1)
