"""Routed attention in torch: the specification."""

from __future__ import annotations

import torch

from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_decode.reference import sparse_decode


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
) -> None:
    """See `api.routed_attention`: a decode step that selects every page."""
    every_page = max(1, block_table.shape[1] * keys.pages_per_block)
    sparse_decode(
        query, keys, values, None, block_table, seq_lens, every_page, 0, 0, 0.0, scale, dense_tokens, dense_requests,
        None, softcap, routing, None, query_scale, key_scale, value_scale, out, None, None,
    )  # fmt: skip
