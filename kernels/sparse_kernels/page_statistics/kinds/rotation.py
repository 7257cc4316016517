"""A rotation that spreads large dimensions over all others. Dot products do not change."""

from __future__ import annotations

import math
from functools import cache

import torch

from sparse_kernels.optional_triton import jit, tl


@cache
def signs(head_size: int) -> torch.Tensor:
    """Draws `[head_size]` float64 signs, 1 or -1, by a 32-bit hash that every implementation can compute."""

    def flipped(d: int) -> int:
        x = (d + 1) * 0x9E3779B1 & 0xFFFFFFFF
        return (x ^ x >> 15) * 0x85EBCA77 >> 31 & 1

    return torch.tensor([1.0 - 2.0 * flipped(d) for d in range(head_size)], dtype=torch.float64)


@cache
def _matrix(head_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    size = head_size & -head_size
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    blocks = torch.block_diag(*[block / math.sqrt(size)] * (head_size // size))
    rotation: torch.Tensor = signs(head_size)[:, None] * blocks
    return rotation.to(device, dtype)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Flips fixed signs, then applies a Hadamard matrix.

    Args:
        x: `[..., head_size]`. If the head size is not a power of two, blocks of its largest such divisor are rotated.

    Returns:
        As `x`.
    """
    return x @ _matrix(x.shape[-1], x.dtype, x.device)


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """Undoes `rotate`."""
    return x @ _matrix(x.shape[-1], x.dtype, x.device).T


@jit
def _butterfly(x, HALF: tl.constexpr, ELEMENTS: tl.constexpr):
    # A stage of the Hadamard transform takes sums and differences of elements at distance HALF.
    low, high = tl.split(tl.permute(tl.reshape(x, (ELEMENTS // (2 * HALF), 2, HALF)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (ELEMENTS,))


@jit
def _transformed(x, ELEMENTS: tl.constexpr, STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    size: tl.constexpr = HEAD_SIZE & -HEAD_SIZE
    for stage in tl.static_range(8):
        if 2**stage < size:
            x = _butterfly(x, STRIDE * 2**stage, ELEMENTS)
    return x * (size**-0.5)


@jit
def _flipped(x, ELEMENTS: tl.constexpr, STRIDE: tl.constexpr, DIMS: tl.constexpr):
    dim = (tl.arange(0, ELEMENTS) // STRIDE % DIMS).to(tl.uint32)
    drawn = (dim + 1) * 0x9E3779B1
    flipped = ((drawn ^ (drawn >> 15)) * 0x85EBCA77) >> 31
    return tl.where(flipped == 1, -x, x)


@jit
def rotated(x, VECTORS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    """`rotate` in Triton.

    `x` is `[HEADS * DIMS * VECTORS]`: `VECTORS` vectors whose elements alternate, zero beyond the head size.
    """
    elements: tl.constexpr = HEADS * DIMS * VECTORS
    return _transformed(_flipped(x, elements, VECTORS, DIMS), elements, VECTORS, HEAD_SIZE)


@jit
def rotated_back(x, HEAD_SIZE: tl.constexpr):
    """`rotate_back` in Triton: `[ROWS, DIMS]`, zero beyond the head size."""
    rows: tl.constexpr = x.shape[0]
    dims: tl.constexpr = x.shape[1]
    x = _transformed(tl.reshape(x, (rows * dims,)), rows * dims, 1, HEAD_SIZE)
    return tl.reshape(_flipped(x, rows * dims, 1, dims), (rows, dims))
