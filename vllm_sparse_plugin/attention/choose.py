"""Chooses pages in torch, for policies that the decode kernel does not know."""

from __future__ import annotations

import torch
from sparse_kernels.batch import DecodeBatch
from sparse_kernels.cache import KVCache

from vllm_sparse_plugin.policies import Selection


def choose_pages(selector: Selection, batch: DecodeBatch, cache: KVCache, may_stop: bool) -> torch.Tensor:
    """Returns the pages that a policy's `select` chooses.

    Args:
        selector: the policy.
        batch: the decoding tokens.
        cache: the layer's cache, with statistics if the policy uses them.
        may_stop: whether attention may stop, so that the pages are in reading order.

    Returns:
        `[num_tokens, num_kv_heads, k]` int32, -1 for none, as in `DecodeBatch.pages`.
    """
    tokens, num_pages = batch.query_tokens(cache.num_kv_heads), batch.num_pages(selector.page_size).long()
    query = tokens.query if tokens.query.dtype.itemsize > 1 else tokens.query.to(torch.bfloat16)
    choose = selector.reading_order if may_stop else selector.select
    return choose(query, cache.statistics, tokens.block_table, num_pages).int().contiguous()
