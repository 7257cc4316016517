"""A sketch of a page's keys: the means of its quarters in two bits an element."""

from __future__ import annotations

import math
from functools import cache

import torch

from sparse_kernels.optional_triton import jit, tl
from sparse_kernels.page_statistics.kinds.base import StatisticsKind

PARTS = 4
"""Quarters of a page; their two-bit codes of one dimension share a byte."""
STEP = 0.9957
"""Distance of four levels that keeps most of a normal distribution of variance 1."""
_LARGEST = torch.finfo(torch.bfloat16).max


@cache
def signs(head_size: int) -> torch.Tensor:
    """`[head_size]` float64 of 1 and -1, drawn by a hash in 32-bit arithmetic that every implementation can compute."""

    def flipped(d: int) -> int:
        x = (d + 1) * 0x9E3779B1 & 0xFFFFFFFF
        return (x ^ x >> 15) * 0x85EBCA77 >> 31 & 1

    return torch.tensor([1.0 - 2.0 * flipped(d) for d in range(head_size)], dtype=torch.float64)


@cache
def _rotation(head_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    size = head_size & -head_size
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    blocks = torch.block_diag(*[block / math.sqrt(size)] * (head_size // size))
    rotation: torch.Tensor = signs(head_size)[:, None] * blocks
    return rotation.to(device, dtype)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Flips fixed signs, then applies a Hadamard matrix: no dot product changes, and no dimension stands out after it.

    Args:
        x: `[..., head_size]`; a head size that is no power of two is rotated in blocks of the largest that divides it.

    Returns:
        As `x`.
    """
    return x @ _rotation(x.shape[-1], x.dtype, x.device)


@jit
def _butterfly(x, HALF: tl.constexpr, ELEMENTS: tl.constexpr):
    # A stage of the Hadamard transform: sums and differences of what lies HALF apart.
    low, high = tl.split(tl.permute(tl.reshape(x, (2 * ELEMENTS // HALF, 2, HALF)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (4, ELEMENTS))


@jit
def _summarise(keys, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    elements: tl.constexpr = HEADS * DIMS
    quarter: tl.constexpr = PAGE_SIZE // 4
    x = tl.sum(tl.reshape(keys, (4, quarter, elements)), axis=1) / quarter
    dim = (tl.arange(0, elements) % DIMS).to(tl.uint32)
    drawn = (dim + 1) * 0x9E3779B1
    flipped = ((drawn ^ (drawn >> 15)) * 0x85EBCA77) >> 31
    x = tl.where((flipped == 1)[None, :], -x, x)
    for stage in tl.static_range(8):
        if 2**stage < DIMS:
            x = _butterfly(x, 2**stage, elements)
    x = x * (DIMS**-0.5)
    even, odd = tl.split(tl.permute(tl.reshape(x, (2, 2, elements)), (2, 0, 1)))
    newest, third = tl.split(even)
    second, oldest = tl.split(odd)
    # Keys come newest first, parts oldest first.
    return oldest, third, second, newest


@jit
def _pack(record, HEADS: tl.constexpr, DIMS: tl.constexpr):
    power = tl.zeros((HEADS,), tl.float32)
    for v in tl.static_range(4):
        part = tl.reshape(record[v], (HEADS, DIMS))
        power += tl.sum(part * part, axis=1)
    power = power / (4 * DIMS)
    finite = power <= 3.3895313892515355e38
    step = tl.where(finite, tl.sqrt_rn(power) * 0.9957, 3.3895313892515355e38).to(tl.bfloat16)
    divisor = step.to(tl.float32)
    divisor = tl.where(divisor > 0, divisor, 1.0)[:, None]
    packed = tl.zeros((HEADS, DIMS), tl.int32)
    for v in tl.static_range(4):
        scaled = tl.div_rn(tl.reshape(record[v], (HEADS, DIMS)), divisor) + 1.5
        # Rounds to the nearest integer, ties to even.
        code = tl.clamp((scaled + 12582912.0) - 12582912.0, 0.0, 3.0)
        code = tl.where(finite[:, None], code, 3.0 - 3.0 * (v % 2))
        packed = packed | (code.to(tl.int32) << (2 * v))
    first, second = tl.split(tl.reshape(packed, (HEADS * DIMS // 2, 2)))
    second = tl.where((first >= 128) & ((second & 0x7F) == 0x7F), second & 0xFE, second)
    return tl.reshape(tl.join(first, second), (HEADS * DIMS,)).to(tl.uint8), step


class Sketch(StatisticsKind):
    """Four keys in the bytes of one.

    The keys of each quarter of a page are averaged (pairs, for pages of 8), rotated, and kept in two bits an element
    with one step for the page,

        x_j = R (1/|Q_j|) sum_(i in Q_j) k_i        s_p(q) = max_j (R q) . x_j

    where R is the rotation of `rotate`. A mean over the page hides a single key that matches the query; among quarters
    it stands out, and two bits are enough to tell pages apart.
    """

    name = "sketch"
    vectors = PARTS
    formats = ("int2",)
    triton_summarise = _summarise
    triton_pack = _pack

    @property
    def is_fused(self) -> bool:
        """See `StatisticsKind.is_fused`: the CUDA kernels know sketches."""
        return True

    @staticmethod
    def summarise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `StatisticsKind.summarise`."""
        return rotate(keys.unflatten(-2, (PARTS, -1)).mean(dim=-2)), None

    @staticmethod
    def features(query: torch.Tensor, std_weight: float) -> torch.Tensor:
        """See `StatisticsKind.features`: the rotated query, four times."""
        rotated = rotate(query).unsqueeze(-2)
        return rotated.expand(*rotated.shape[:-2], PARTS, -1)

    @staticmethod
    def combine(products: torch.Tensor) -> torch.Tensor:
        """See `StatisticsKind.combine`: the largest."""
        return products.amax(dim=-1)


def pack(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Four vectors in two bits an element.

    An element is stored as a code c from 0 to 3 and stands for `(c - 1.5) * step`. Byte d holds the codes of dimension
    d, the first vector's in its lowest bits. Where two bytes would form an infinite or NaN bfloat16 (see
    `StatisticsLayout`), the lowest bit of the second is cleared. A page whose keys are not all finite gets the largest
    step and codes by which every query finds it.

    Args:
        vectors: `[..., 4, head_size]` float32, an even head size.

    Returns:
        `[..., head_size]` uint8 and the step `[...]` bfloat16.
    """
    power = vectors.double().square().mean(dim=(-2, -1))
    finite = power <= _LARGEST
    step = torch.where(finite, (power.sqrt() * STEP).float(), _LARGEST).bfloat16()
    divisor = torch.where(step > 0, step, 1.0).float()[..., None, None]
    codes = (vectors / divisor + 1.5).round().clamp(0, 3)
    both_signs = torch.tensor([3.0, 0.0, 3.0, 0.0], device=vectors.device)[:, None]
    codes = torch.where(finite[..., None, None], codes, both_signs).to(torch.uint8)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=vectors.device)[:, None]
    packed = (codes << shifts).sum(dim=-2, dtype=torch.uint8)
    words = packed.contiguous().view(torch.int16)
    return torch.where((words & 0x7F80) == 0x7F80, words & ~0x0100, words).view(torch.uint8), step


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack` in units of the step: `[..., head_size]` uint8 to `[..., 4 * head_size]` float32."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)[:, None]
    return (((packed.unsqueeze(-2) >> shifts) & 3).float() - 1.5).flatten(-2)
