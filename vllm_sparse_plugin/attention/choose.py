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
    per_request = batch.tokens_per_request
    query = batch.query if batch.query.dtype.itemsize > 1 else batch.query.to(torch.bfloat16)
    position = torch.arange(per_request, device=query.device)
    context_lens = batch.seq_lens.long()[:, None] - (per_request - 1 - position)
    num_pages = context_lens.flatten().clamp(min=0) // selector.page_size
    block_table = batch.block_table.long().repeat_interleave(per_request, dim=0)
    grouped = query.unflatten(1, (cache.num_kv_heads, -1))
    choose = selector.reading_order if may_stop else selector.select
    return choose(grouped, cache.statistics, block_table, num_pages).int().contiguous()
