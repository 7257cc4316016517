"""Routed attention in torch: the specification."""

from __future__ import annotations

import torch

from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_decode.reference import decode_tokens, sinks_then_newest
from sparse_kernels.termination import StopRule


def routed_attention(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    routing: GroupRouting | None,
    scale: float,
    dense_tokens: int,
    dense_requests: torch.Tensor | None,
    softcap: float,
    query_scale: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    splits: int,  # of the fast path's work alone
    out: torch.Tensor,
    rule: StopRule | None = None,
    sink_pages: int = 0,
    sinks: torch.Tensor | None = None,
    visited: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,  # as splits
) -> None:
    """See `api.routed_attention`: a decode step that reads every page."""

    def order(grouped: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        num_pages = int(lengths)
        if rule is None or num_pages == 0:
            return None
        return sinks_then_newest(num_pages, sink_pages, num_pages, grouped)

    decode_tokens(
        query, keys, values, block_table, seq_lens, order, scale, dense_tokens, dense_requests, sinks, softcap, routing,
        rule, query_scale, key_scale, value_scale, out, visited, counters,
    )  # fmt: skip
