"""Attends to contexts whole in torch; this is the specification of split attention."""

from __future__ import annotations

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.sparse_decode.reference import decode_tokens, sinks_then_newest
from sparse_kernels.split_attention.pieces import Stopping


def split_attention(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    routing: GroupRouting | None,
    stopping: Stopping | None,
    splits: int,  # concerns the work of the fast path alone
    output: DecodeOutput,
) -> None:
    """See `api.split_attention`: a decode step that reads every page."""

    def order(token: QueryTokens, _: int) -> torch.Tensor | None:
        num_pages = int(token.num_pages(cache.page_size))
        if stopping is None or num_pages == 0:
            return None
        return sinks_then_newest(token, num_pages, stopping.sink_pages, num_pages)

    decode_tokens(batch, cache, softmax, order, routing, stopping.rule if stopping else None, output)
