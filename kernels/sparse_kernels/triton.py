"""Functions that the Triton kernels of several operations share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def to_base_2(logits, SOFTCAP: tl.constexpr):
    """Logits to the base 2, capped where there is a softcap."""
    if SOFTCAP > 0:
        # tanh by an exponential: Triton's own lives in libdevice, which its interpreter does not have.
        logits = (1 - 2 / (tl.exp2(logits * (2 * LOG2E / SOFTCAP)) + 1)) * SOFTCAP
    return logits * LOG2E


def arithmetic(query: torch.Tensor) -> tl.dtype:
    """Returns what the matrix units multiply: queries of 8 bits are exact in 16 bits."""
    return _DTYPES.get(query.dtype, tl.bfloat16)
