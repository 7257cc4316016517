"""Attention under the soft mask on a GPU, forward and backward.

A row of a tile is a query head of a token. The heads of a group are adjacent because they share a mask. Page scores are
computed once for some tokens at a time and become log m in place: one number per token, KV head and page. The attention
kernels read them. In the backward pass, the index of the winning head and vector takes the same number of elements. No
other array has this size.

In the backward pass, the kernel for queries overwrites log m with the gradients of the scores. Two further kernels pass
these gradients to the winning head and vector. Gradients of keys, values and records are summed in float32, one part of
the tokens after the other, and in each part by one program. The result does not depend on the launch.
"""

from __future__ import annotations

from typing import Any

import torch

from sparse_kernels.masked_attention.triton.backward import gradients as gradients_of
from sparse_kernels.masked_attention.triton.forward import attend
from sparse_kernels.masked_attention.triton.scores import Call, Records


class _SoftAttention(torch.autograd.Function):
    """The kernels as torch differentiates them."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        vectors: torch.Tensor,
        spread: torch.Tensor | None,
        stored: torch.Tensor,
        scales: torch.Tensor | None,
        call: Call,
    ) -> torch.Tensor:
        records = (stored, scales, spread)
        output, log_sum, threshold = attend(query, key, value, records, call)
        ctx.save_for_backward(query, key, value, *records, output, log_sum, threshold)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, stored, scales, spread, *attended = ctx.saved_tensors
        output, log_sum, threshold = attended
        of_inputs = gradients_of(
            query, key, value, (stored, scales, spread), ctx.call, gradients[0].contiguous(),
            (output, log_sum, threshold),
        )  # fmt: skip
        return *of_inputs, None, None, None


def soft_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, vectors: torch.Tensor, records: Records, call: Call
) -> torch.Tensor:
    """Computes attention under the soft mask.

    Args:
        query: `[num_tokens, num_query_heads, head_size]`, contiguous.
        key: `[num_tokens, num_kv_heads, head_size]`, contiguous.
        value: as `key`.
        vectors: the vectors that get gradients.
        records: of all complete pages, as in serving.
        call: the arguments of the call.

    Returns:
        Like `query`.
    """
    stored, scales, spread = records
    output: torch.Tensor = _SoftAttention.apply(query, key, value, vectors, spread, stored, scales, call)
    return output
