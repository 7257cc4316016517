"""Entry point of the kernels."""

from __future__ import annotations

import torch

from sparse_kernels.masked_attention.packing import Packing
from sparse_kernels.masked_attention.records import PageRecords
from sparse_kernels.masked_attention.rule import PageMask
from sparse_kernels.masked_attention.triton.listed import listed_attention
from sparse_kernels.masked_attention.triton.scores import Call
from sparse_kernels.masked_attention.triton.soft import soft_attention


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    records: PageRecords,
    packing: Packing,
    mask: PageMask,
    scale: float,
) -> torch.Tensor:
    """See `api.masked_attention`."""
    num_kv_heads, head_size = key.shape[1:]
    call = Call(
        packing=packing,
        mask=mask,
        scale=scale,
        num_kv_heads=num_kv_heads,
        group_size=query.shape[1] // num_kv_heads,
        vectors=records.vectors.shape[2],
        head_size=head_size,
    )
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    stored = records.stored.to(query.dtype).contiguous()
    spread = None if records.spread is None else records.spread.contiguous()
    if mask.is_hard:
        # The scores get no gradient under the hard mask.
        served = (stored, records.scales, None if spread is None else spread.detach())
        return listed_attention(query, key, value, served, call)
    return soft_attention(query, key, value, records.vectors, (stored, records.scales, spread), call)
