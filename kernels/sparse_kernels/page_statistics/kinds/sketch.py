"""A sketch of a page's keys: the means of its quarters in two bits an element."""

from __future__ import annotations

import math
from functools import cache

import torch

from sparse_kernels.page_statistics.kinds.base import StatisticsKind

PARTS = 4
"""Quarters of a page; their two-bit codes of one dimension share a byte."""
STEP = 0.9957
"""Distance of four levels that keeps most of a normal distribution of variance 1."""
_SIGN_MULTIPLIER = 0x9E3779B1


@cache
def signs(head_size: int) -> torch.Tensor:
    """`[head_size]` float64 of 1 and -1: -1 where bit 15 of `(d + 1) * 0x9E3779B1` is set."""
    bits = [((d + 1) * _SIGN_MULTIPLIER >> 15) & 1 for d in range(head_size)]
    return torch.tensor([1.0 - 2.0 * bit for bit in bits], dtype=torch.float64)


@cache
def _rotation(head_size: int) -> torch.Tensor:
    size = head_size & -head_size
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    blocks = torch.block_diag(*[block / math.sqrt(size)] * (head_size // size))
    return signs(head_size)[:, None] * blocks


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Flips fixed signs, then applies a Hadamard matrix: it changes no dot product, and no dimension stands out after it.

    Args:
        x: `[..., head_size]`; a head size that is no power of two is rotated in blocks of the largest one that divides it.

    Returns:
        As `x`.
    """
    return x @ _rotation(x.shape[-1]).to(x)


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

    An element is stored as a code c from 0 to 3 and stands for `(c - 1.5) * step`. Byte d holds the codes of dimension d,
    the first vector's in its lowest bits. Where two bytes would form an infinite or NaN bfloat16 (see
    `StatisticsLayout`), the lowest bit of the second is cleared. A page whose keys are not all finite gets the largest
    step and codes by which every query finds it.

    Args:
        vectors: `[..., 4, head_size]` float32, an even head size.

    Returns:
        `[..., head_size]` uint8 and the step `[...]` bfloat16.
    """
    power = vectors.double().square().mean(dim=(-2, -1))
    finite = (power <= torch.finfo(torch.bfloat16).max).unsqueeze(-1).unsqueeze(-1)
    largest = torch.finfo(torch.bfloat16).max
    step = torch.where(finite[..., 0, 0], (power.sqrt() * STEP).float(), largest).bfloat16()
    divisor = torch.where(step > 0, step, 1.0).float().unsqueeze(-1).unsqueeze(-1)
    codes = (vectors / divisor + 1.5).round().clamp(0, 3)
    both_signs = torch.tensor([3.0, 0.0, 3.0, 0.0], device=vectors.device)[:, None]
    codes = torch.where(finite, codes, both_signs).to(torch.uint8)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=vectors.device)[:, None]
    packed = (codes << shifts).sum(dim=-2, dtype=torch.uint8)
    words = packed.contiguous().view(torch.int16)
    return torch.where((words & 0x7F80) == 0x7F80, words & ~0x0100, words).view(torch.uint8), step


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack` in units of the step: `[..., head_size]` uint8 to `[..., 4 * head_size]` float32."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)[:, None]
    return (((packed.unsqueeze(-2) >> shifts) & 3).float() - 1.5).flatten(-2)
