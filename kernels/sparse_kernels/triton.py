"""Functions shared by the Triton kernels of several operations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def to_base_2(logits, SOFTCAP: tl.constexpr):
    """Returns logits to the base 2, capped if there is a softcap."""
    if SOFTCAP > 0:
        # tanh by an exponential: Triton's tanh needs libdevice, which its interpreter does not have.
        logits = (1 - 2 / (tl.exp2(logits * (2 * LOG2E / SOFTCAP)) + 1)) * SOFTCAP
    return logits * LOG2E


@triton.jit
def rows_at(strides, table_ptr, column, exists, kv_head, BLOCK_TOKENS: tl.constexpr):
    """Returns the offsets, in elements, of the keys or values of some tokens of a context."""
    block = tl.load(table_ptr + column // BLOCK_TOKENS, mask=exists, other=0).to(tl.int64)
    return block * strides[0] + kv_head * strides[1] + column % BLOCK_TOKENS * strides[2]


@triton.jit
def read_rows(rows_ptr, place, exists, dim, HEAD_SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Loads keys or values `[KEYS, DIMS]`."""
    mask = exists[:, None] & (dim < HEAD_SIZE)[None, :]
    return tl.load(rows_ptr + place[:, None] + dim[None, :], mask=mask, other=0.0).to(DTYPE)


@triton.jit
def add_tokens(largest, total, sums, logits, values, DTYPE: tl.constexpr):
    """Adds tokens to the softmax of each row."""
    peak = tl.maximum(largest, tl.max(logits, axis=1))
    # A row that has seen no token has a peak of -inf. Nothing can be subtracted from -inf.
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(logits - base[:, None])
    shrunk = tl.exp2(largest - base)
    total = total * shrunk + tl.sum(weights, axis=1)
    sums = sums * shrunk[:, None] + tl.dot(weights.to(DTYPE), values, input_precision="ieee")
    return peak, total, sums


def arithmetic(query: torch.Tensor) -> tl.dtype:
    """Returns the dtype of the matrix units' operands. 8-bit queries are exact in 16 bits."""
    return _DTYPES.get(query.dtype, tl.bfloat16)
