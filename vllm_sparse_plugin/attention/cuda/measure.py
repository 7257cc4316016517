"""Measures the selection of one decoding token."""

from __future__ import annotations

from dataclasses import replace

import torch
from sparse_kernels.batch import DecodeBatch, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.group_routing import route_groups
from sparse_kernels.page_topk import best_first, select_pages

from vllm_sparse_plugin.attention.cuda.metadata import SampledToken
from vllm_sparse_plugin.attention.plan import LayerPlan
from vllm_sparse_plugin.attention.stopping import select_until_stable
from vllm_sparse_plugin.policies.scored import ScoredSelection


def measure_token(
    plan: LayerPlan, softmax: Softmax, batch: DecodeBatch, cache: KVCache, index: int, sampled: SampledToken
) -> None:
    """Measures the selection of one token if this layer is sampled.

    It waits for the device only with a stop rule.
    """
    if plan.quality is None or plan.selector is None or not plan.quality.measures(sampled.sample):
        return
    if batch.query.is_cuda and torch.cuda.is_current_stream_capturing():
        # A captured graph would measure in every step.
        return
    request, position = divmod(index, batch.tokens_per_request)
    this = slice(request, request + 1)
    context_lens = (batch.seq_lens[this] - (batch.tokens_per_request - 1 - position)).long()
    query = batch.query[index : index + 1].unflatten(1, (cache.num_kv_heads, -1))
    # The whole row of the block table: kernels that choose pages are compiled for its width.
    token = QueryTokens(query, batch.block_table[this].long(), context_lens)
    pages = _pages_read(plan, softmax, token, batch, cache, index, sampled)
    # The host knows only an upper bound of the length. The context may be short enough to be read whole.
    left_out = (context_lens <= plan.dense_tokens)[:, None]
    if plan.routing is not None:
        left_out = left_out | route_groups(token, cache.keys, plan.routing)
    if batch.query_scale is not None:
        token = replace(token, query=query.float() * batch.query_scale)
    selection = plan.selector.page_selection()
    plan.quality.record(token, sampled.longest, cache, pages, softmax, selection, sampled.masses, left_out)


def _pages_read(
    plan: LayerPlan,
    softmax: Softmax,
    token: QueryTokens,
    batch: DecodeBatch,
    cache: KVCache,
    index: int,
    sampled: SampledToken,
) -> torch.Tensor:
    """Returns the complete pages that one token reads: `[1, num_kv_heads, k]`, -1 for none."""
    selector, num_pages = plan.selector, token.num_pages(plan.page_size)
    assert selector is not None
    if batch.pages is not None:
        # Those of another layer.
        pages, budgets = batch.pages[index : index + 1], batch.token_budgets()
        most = pages.shape[2] if budgets is None else budgets[index].reshape(-1, 1)
        return torch.where(torch.arange(pages.shape[2], device=pages.device) < most, pages, -1)
    if batch.scores is not None and batch.budgets is not None:
        # The coverage has decided the number of pages of each KV head; these are its best pages.
        assert isinstance(selector, ScoredSelection)
        scores = batch.scores[index : index + 1]
        always = selector.sink_pages, selector.recent_pages
        pages = select_pages(scores, num_pages, sampled.pages, *always)
        slot = torch.arange(pages.shape[2], device=pages.device)
        ranked = best_first(pages, scores, num_pages, *always)
        return torch.where(slot < batch.budgets[index][:, None], ranked, -1)
    selector = selector.model_copy(update={"budget_tokens": sampled.pages * plan.page_size})
    query = token.query if token.query.dtype.itemsize > 1 else token.query.to(torch.bfloat16)
    if plan.stop_rule is None:
        return selector.select(query, cache.statistics, token.block_table, num_pages)
    scale = softmax.scale if batch.query_scale is None else softmax.scale * float(batch.query_scale)
    scaled = replace(softmax, scale=scale)
    return select_until_stable(selector, plan.stop_rule, replace(token, query=query), cache, scaled)[0]
