"""Attention under the soft mask on a GPU, forward and backward.

A row of a tile is a query head of a token; the heads of a group lie side by side, since they share a mask. Some tokens
at a time, the pages' scores are computed once and become log m in place, which the kernels that attend read: a number
for a token, KV head and page beside a group's heads and a page's keys. Beside it there is, in the backward pass, which
head and vector has each score, and nothing else of that size.

In the backward pass the kernel of the queries writes what the scores' gradients are over log m, so that these go on to
the head and vector that won, in two kernels of their own. Gradients of keys, values and records are added up in
float32, part of the tokens after part and in each by one program, so that results do not depend on the launch.
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
        vectors: the vectors that gradients reach.
        records: of all complete pages, as they are served.
        call: what is computed.

    Returns:
        Like `query`.
    """
    stored, scales, spread = records
    output: torch.Tensor = _SoftAttention.apply(query, key, value, vectors, spread, stored, scales, call)
    return output
