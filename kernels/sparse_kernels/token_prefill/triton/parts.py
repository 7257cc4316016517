"""Parts of the kernels of a sparse prefill."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from sparse_kernels.triton import LOG2E, to_base_2


class Tile(NamedTuple):
    """The work of a program in one step."""

    rows: int
    """Query tokens of a head."""
    keys: int


def tile_of(head_size: int) -> Tile:
    """Returns a tile that fits the shared memory of a thread block on every supported GPU, double buffered."""
    return Tile(64, 64) if head_size <= 128 else Tile(64, 32)


@triton.jit
def base_2_logits(query, keys, factor, SOFTCAP: tl.constexpr):
    """Returns products of queries with keys `[DIMS, keys]`, as logits to the base 2."""
    return to_base_2(tl.dot(query, keys, input_precision="ieee") * factor, SOFTCAP)


@triton.jit
def logit_factor(scale, query_scale_ptr, key_scale_ptr):
    """Returns the factor of products of queries and keys as they are stored."""
    if query_scale_ptr is not None:
        scale *= tl.load(query_scale_ptr)
    if key_scale_ptr is not None:
        scale *= tl.load(key_scale_ptr)
    return scale


@triton.jit
def sink_logit(sinks_ptr, head, ROWS: tl.constexpr):
    """Returns the largest logit and the sum of weights of each row before its first token."""
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks_ptr is not None:
        largest = tl.zeros((ROWS,), tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        total += 1.0
    return largest, total
