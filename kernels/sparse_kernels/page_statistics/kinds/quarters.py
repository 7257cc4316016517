"""Kinds that store the quarters of a page's keys with a few bits per element."""

from __future__ import annotations

import math
from functools import cache
from typing import ClassVar

import torch

from sparse_kernels.optional_triton import constexpr, jit, tl
from sparse_kernels.page_statistics.codes import Codes
from sparse_kernels.page_statistics.kinds.base import LARGEST_FINITE, RecordFormat, StatisticsKind

_FOUR_BITS = Codes(bits=4, spacing=0.3352, dropped=2)
_TWO_BITS = Codes(bits=2, spacing=0.9957)
_FOUR_BIT_SPACING, _TWO_BIT_SPACING = constexpr(_FOUR_BITS.spacing), constexpr(_TWO_BITS.spacing)


@cache
def signs(head_size: int) -> torch.Tensor:
    """Draws `[head_size]` float64 signs, 1 or -1, by a 32-bit hash that every implementation can compute."""

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
    """Flips fixed signs, then applies a Hadamard matrix. Dot products do not change; large dimensions are spread out.

    Args:
        x: `[..., head_size]`. If the head size is not a power of two, blocks of its largest such divisor are rotated.

    Returns:
        As `x`.
    """
    return x @ _rotation(x.shape[-1], x.dtype, x.device)


@jit
def _butterfly(x, HALF: tl.constexpr, ELEMENTS: tl.constexpr):
    # A stage of the Hadamard transform takes sums and differences of elements at distance HALF.
    low, high = tl.split(tl.permute(tl.reshape(x, (ELEMENTS // (2 * HALF), 2, HALF)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (ELEMENTS,))


@jit
def _summarise(keys, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    # Keys come newest first, vectors oldest first.
    elements: tl.constexpr = HEADS * DIMS
    quarter: tl.constexpr = PAGE_SIZE // 4
    x = tl.sum(tl.reshape(keys, (4, quarter, elements)), axis=1) / quarter
    even, odd = tl.split(tl.permute(tl.reshape(x, (2, 2, elements)), (2, 0, 1)))
    newest, third = tl.split(even)
    second, oldest = tl.split(odd)
    return oldest, third, second, newest


@jit
def _flipped(x, ELEMENTS: tl.constexpr, DIMS: tl.constexpr):
    dim = (tl.arange(0, ELEMENTS) % DIMS).to(tl.uint32)
    drawn = (dim + 1) * 0x9E3779B1
    flipped = ((drawn ^ (drawn >> 15)) * 0x85EBCA77) >> 31
    return tl.where(flipped == 1, -x, x)


@jit
def _rotated(x, ELEMENTS: tl.constexpr, DIMS: tl.constexpr):
    x = _flipped(x, ELEMENTS, DIMS)
    for stage in tl.static_range(8):
        if 2**stage < DIMS:
            x = _butterfly(x, 2**stage, ELEMENTS)
    return x * (DIMS**-0.5)


@jit
def _summarise_rotated(keys, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    first, second, third, fourth = _summarise(keys, PAGE_SIZE, HEADS, DIMS)
    return (
        _rotated(first, HEADS * DIMS, DIMS),
        _rotated(second, HEADS * DIMS, DIMS),
        _rotated(third, HEADS * DIMS, DIMS),
        _rotated(fourth, HEADS * DIMS, DIMS),
    )


@jit
def _features_rotated(query, std_weight):
    dims: tl.constexpr = query.shape[0]
    rotated = _rotated(query, dims, dims)
    return rotated, rotated, rotated, rotated


@jit
def _square_sum(x, DROPPED: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    squares = tl.reshape(x * x, (HEADS, DIMS))
    if DROPPED > 0:
        squares = tl.where((tl.arange(0, DIMS) >= DROPPED)[None, :], squares, 0.0)
    return tl.sum(squares, axis=1)


@jit
def _step_of(power, FACTOR: tl.constexpr):
    step = tl.where(power <= LARGEST_FINITE, tl.sqrt_rn(power) * FACTOR, LARGEST_FINITE)
    return step.to(tl.bfloat16)


@jit
def _code(x, power, step, TOP: tl.constexpr, WHEN_NOT_FINITE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    divisor = step.to(tl.float32)
    divisor = tl.where(divisor > 0, divisor, 1.0)[:, None]
    scaled = tl.div_rn(tl.reshape(x, (HEADS, DIMS)), divisor) + TOP / 2
    # The addition rounds to the nearest integer, ties to even.
    code = tl.clamp((scaled + 12582912.0) - 12582912.0, 0.0, TOP)
    code = tl.where((power <= LARGEST_FINITE)[:, None], code, WHEN_NOT_FINITE)
    return code.to(tl.int32)


@jit
def _finite_bytes(packed, HEADS: tl.constexpr, DIMS: tl.constexpr):
    first, second = tl.split(tl.reshape(packed, (HEADS * DIMS // 2, 2)))
    second = tl.where((first >= 128) & ((second & 0x7F) == 0x7F), second & 0xFE, second)
    return tl.reshape(tl.join(first, second), (HEADS * DIMS,)).to(tl.uint8)


@jit
def _pack_two_bits(record, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    power = tl.zeros((HEADS,), tl.float32)
    for v in tl.static_range(4):
        power += _square_sum(record[v], 0, HEADS, DIMS)
    power = power / (4 * HEAD_SIZE)
    step = _step_of(power, _TWO_BIT_SPACING)
    packed = tl.zeros((HEADS, DIMS), tl.int32)
    for v in tl.static_range(4):
        packed = packed | (_code(record[v], power, step, 3, 3.0 - 3.0 * (v % 2), HEADS, DIMS) << (2 * v))
    return (_finite_bytes(packed, HEADS, DIMS),), (step,)


@jit
def _pack_pair(low, high, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    power = _square_sum(low, 2, HEADS, DIMS) + _square_sum(high, 2, HEADS, DIMS)
    power = power / (2 * (HEAD_SIZE - 2))
    step = _step_of(power, _FOUR_BIT_SPACING)
    packed = _code(low, power, step, 15, 15.0, HEADS, DIMS) | (_code(high, power, step, 15, 0.0, HEADS, DIMS) << 4)
    return _finite_bytes(packed, HEADS, DIMS), step


@jit
def _pack_four_bits(record, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    first, first_step = _pack_pair(record[0], record[1], HEAD_SIZE, HEADS, DIMS)
    second, second_step = _pack_pair(record[2], record[3], HEAD_SIZE, HEADS, DIMS)
    return (first, second), (first_step, second_step)


@jit
def _rotated_back(x):
    pages: tl.constexpr = x.shape[0]
    dims: tl.constexpr = x.shape[1]
    x = tl.reshape(x, (pages * dims,))
    for stage in tl.static_range(8):
        if 2**stage < dims:
            x = _butterfly(x, 2**stage, pages * dims)
    return tl.reshape(_flipped(x * (dims**-0.5), pages * dims, dims), (pages, dims))


@jit
def _keys_rotated_back(vectors):
    first, second = _rotated_back(vectors[0]), _rotated_back(vectors[1])
    return first, second, _rotated_back(vectors[2]), _rotated_back(vectors[3])


class Quarters(StatisticsKind):
    """The mean key of each quarter of a page, with four bits per element.

    For pages of 8, x_j is the mean of two keys,

        x_j = (1/|Q_j|) sum_(i in Q_j) k_i        s_p(q) = max_j q . x_j

    The mean of a page hides a single key that matches the query; the mean of a quarter does not. Two quarters share a
    step. The first two elements are not stored: the steps take their place.
    """

    name = "quarters"
    vectors = 4
    codes = _FOUR_BITS
    formats: ClassVar[tuple[RecordFormat, ...]] = ("int4",)
    triton_summarise = _summarise
    triton_pack = _pack_four_bits

    @property
    def is_fused(self) -> bool:
        """See `StatisticsKind.is_fused`: the CUDA kernels read these codes."""
        return True

    @staticmethod
    def summarise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `StatisticsKind.summarise`."""
        return keys.unflatten(-2, (4, -1)).mean(dim=-2), None

    @staticmethod
    def features(query: torch.Tensor, std_weight: float) -> torch.Tensor:
        """See `StatisticsKind.features`: the query, four times."""
        return query.unsqueeze(-2).expand(*query.shape[:-1], 4, query.shape[-1])

    @staticmethod
    def combine(products: torch.Tensor) -> torch.Tensor:
        """See `StatisticsKind.combine`: the largest."""
        return products.amax(dim=-1)


class Sketch(Quarters):
    """The four quarters of a page, rotated, with two bits per element: the bytes of one 8-bit key.

        x_j = R (1/|Q_j|) sum_(i in Q_j) k_i        s_p(q) = max_j (R q) . x_j

    R is the rotation of `rotate`. Without it, the step would follow the largest dimensions, and two bits would lose
    all others. The page has one step.
    """

    name = "sketch"
    codes = _TWO_BITS
    formats: ClassVar[tuple[RecordFormat, ...]] = ("int2",)
    triton_summarise = _summarise_rotated
    triton_features = _features_rotated
    triton_pack = _pack_two_bits
    triton_summary_keys = _keys_rotated_back

    @staticmethod
    def summarise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `StatisticsKind.summarise`."""
        return rotate(Quarters.summarise(keys)[0]), None

    @staticmethod
    def features(query: torch.Tensor, std_weight: float) -> torch.Tensor:
        """See `StatisticsKind.features`: the rotated query, four times."""
        return Quarters.features(rotate(query), std_weight)

    @staticmethod
    def summary(vectors: torch.Tensor, spread: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `StatisticsKind.summary`: the quarters, rotated back."""
        return vectors @ _rotation(vectors.shape[-1], vectors.dtype, vectors.device).T, spread
