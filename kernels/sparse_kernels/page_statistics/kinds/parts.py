"""Kinds that store the mean keys of equal parts of a page with a few bits per element."""

from __future__ import annotations

from typing import ClassVar

import torch

from sparse_kernels.optional_triton import constexpr, jit, tl
from sparse_kernels.page_statistics.codes import Codes, RowCodes
from sparse_kernels.page_statistics.kinds.base import LARGEST_FINITE, RecordFormat, StatisticsKind
from sparse_kernels.page_statistics.kinds.rotation import rotate, rotate_back, rotated, rotated_back

# Keys have heavy tails: twice the best step of a normal distribution keeps large elements. See `research/real`.
_FOUR_BITS = Codes(bits=4, vectors=4, spacing=0.7, dropped=2)
_TWO_BITS = Codes(bits=2, vectors=4, spacing=0.9957)
_LEVELS = RowCodes(bits=4, vectors=4, spacing=0.7)
_LEVEL_SPACING, _LEVEL_DROPPED = constexpr(_LEVELS.spacing), constexpr(_LEVELS.dropped)
_NOT_FINITE = 2.0**100
_FOUR_BIT_SPACING, _TWO_BIT_SPACING = constexpr(_FOUR_BITS.spacing), constexpr(_TWO_BITS.spacing)


@jit
def _quarters_of(keys, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    # `[HEADS * DIMS * 4]`: the quarters of an element, newest first like the keys, lie side by side in one thread.
    quarter: tl.constexpr = PAGE_SIZE // 4
    means = tl.sum(tl.reshape(keys, (4, quarter, HEADS * DIMS)), axis=1) / quarter
    return tl.reshape(tl.permute(means, (1, 0)), (HEADS * DIMS * 4,))


@jit
def _four_of(x, ELEMENTS: tl.constexpr):
    # The oldest comes first.
    even, odd = tl.split(tl.reshape(x, (ELEMENTS, 2, 2)))
    newest, third = tl.split(even)
    second, oldest = tl.split(odd)
    return oldest, third, second, newest


@jit
def _finite_bytes(packed, ELEMENTS: tl.constexpr):
    first, second = tl.split(tl.reshape(packed, (ELEMENTS // 2, 2)))
    second = tl.where((first >= 128) & ((second & 0x7F) == 0x7F), second & 0xFE, second)
    return tl.reshape(tl.join(first, second), (ELEMENTS,)).to(tl.uint8)


@jit
def _pack_row(
    vectors,
    BITS: tl.constexpr,
    DROPPED: tl.constexpr,
    SPACING: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    # `Codes.pack` of the vectors that share a step, a tuple of `[HEADS * DIMS]`, oldest first.
    shared: tl.constexpr = 8 // BITS
    top: tl.constexpr = 2**BITS - 1
    squares = tl.zeros((HEADS * DIMS,), tl.float32)
    for v in tl.static_range(shared):
        squares += vectors[v] * vectors[v]
    squares = tl.reshape(squares, (HEADS, DIMS))
    squares = tl.where((tl.arange(0, DIMS) >= DROPPED)[None, :], squares, 0.0)
    power = tl.sum(squares, axis=1) / (shared * (HEAD_SIZE - DROPPED))
    finite = power <= LARGEST_FINITE
    step = tl.where(finite, tl.sqrt_rn(power) * SPACING, LARGEST_FINITE).to(tl.bfloat16)
    divisor = step.to(tl.float32)
    divisor = tl.where(divisor > 0, divisor, 1.0)[:, None]
    packed = tl.zeros((HEADS, DIMS), tl.int32)
    for v in tl.static_range(shared):
        scaled = tl.div_rn(tl.reshape(vectors[v], (HEADS, DIMS)), divisor) + top / 2
        # The addition rounds to the nearest integer, ties to even.
        code = tl.clamp((scaled + 12582912.0) - 12582912.0, 0.0, top)
        code = tl.where(finite[:, None], code, top * (1.0 - v % 2))
        packed = packed | (code.to(tl.int32) << (BITS * v))
    return _finite_bytes(tl.reshape(packed, (HEADS * DIMS,)), HEADS * DIMS), step


@jit
def _pack_quarters(parts, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    a, b, c, d = _four_of(parts, HEADS * DIMS)
    older, older_step = _pack_row((a, b), 4, 2, _FOUR_BIT_SPACING, HEAD_SIZE, HEADS, DIMS)
    newer, newer_step = _pack_row((c, d), 4, 2, _FOUR_BIT_SPACING, HEAD_SIZE, HEADS, DIMS)
    return (older, newer), (older_step, newer_step)


@jit
def _pack_sketch(parts, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    vectors = _four_of(rotated(parts, 4, HEAD_SIZE, HEADS, DIMS), HEADS * DIMS)
    packed, step = _pack_row(vectors, 2, 0, _TWO_BIT_SPACING, HEAD_SIZE, HEADS, DIMS)
    return (packed,), (step,)


@jit
def _rotated_back(vectors, HEAD_SIZE: tl.constexpr):
    first, second = rotated_back(vectors[0], HEAD_SIZE), rotated_back(vectors[1], HEAD_SIZE)
    return first, second, rotated_back(vectors[2], HEAD_SIZE), rotated_back(vectors[3], HEAD_SIZE)


class Parts(StatisticsKind):
    """The mean keys of equal parts of a page, a few bits per element; R is the rotation of `rotate`, or the identity:

    x_j = R (1/|P_j|) sum_(i in P_j) k_i        s_p(q) = max_j (R q) . x_j
    """

    codes: ClassVar[Codes]
    is_rotated: ClassVar[bool] = False
    """Whether R is a rotation. Without one the step follows the largest dimensions, and two bits lose all others."""

    @property
    def is_fused(self) -> bool:
        """See `StatisticsKind.is_fused`: the CUDA kernels read these codes."""
        return True

    @classmethod
    def summarise(cls, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `StatisticsKind.summarise`."""
        means = keys.unflatten(-2, (cls.vectors, -1)).mean(dim=-2)
        return rotate(means) if cls.is_rotated else means, None

    @classmethod
    def features(cls, query: torch.Tensor, std_weight: float) -> torch.Tensor:
        """See `StatisticsKind.features`: the query, rotated like the record, for every vector."""
        turned = (rotate(query) if cls.is_rotated else query).unsqueeze(-2)
        return turned.expand(*query.shape[:-1], cls.vectors, query.shape[-1])

    @staticmethod
    def combine(products: torch.Tensor) -> torch.Tensor:
        """See `StatisticsKind.combine`: the largest."""
        return products.amax(dim=-1)

    @classmethod
    def summary(cls, vectors: torch.Tensor, spread: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `StatisticsKind.summary`: the means, rotated back."""
        return rotate_back(vectors) if cls.is_rotated else vectors, spread


class Quarters(Parts):
    """The mean key of each quarter of a page, with four bits per element.

    The mean of a page hides a single key that matches the query; the mean of two keys does so less. Two quarters share
    a step. The first two elements are not stored: the steps take their place.
    """

    name = "quarters"
    codes = _FOUR_BITS
    vectors = codes.vectors
    formats: ClassVar[tuple[RecordFormat, ...]] = ("int4",)
    triton_summarise = _quarters_of
    triton_pack = _pack_quarters


class Sketch(Parts):
    """The rotated quarters of a page, with two bits per element: the bytes of one 8-bit key. The page has one step."""

    name = "sketch"
    is_rotated = True
    codes = _TWO_BITS
    vectors = codes.vectors
    formats: ClassVar[tuple[RecordFormat, ...]] = ("int2",)
    triton_summarise = _quarters_of
    triton_pack = _pack_sketch
    triton_summary_keys = _rotated_back


@jit
def _row_power(vector, DROPPED: tl.constexpr, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    squares = tl.reshape(vector * vector, (HEADS, DIMS))
    squares = tl.where((tl.arange(0, DIMS) >= DROPPED)[None, :], squares, 0.0)
    return tl.sum(squares, axis=1) / (HEAD_SIZE - DROPPED)


@jit
def _pack_in_pairs(
    vector, power, finite, IS_FIRST: tl.constexpr, SPACING: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr
):
    # A row of `RowCodes.pack`.
    step = tl.where(finite, tl.sqrt_rn(power) * SPACING, LARGEST_FINITE if IS_FIRST else 0.0).to(tl.bfloat16)
    divisor = step.to(tl.float32)
    divisor = tl.where(divisor > 0, divisor, 1.0)[:, None]
    scaled = tl.div_rn(tl.reshape(vector, (HEADS, DIMS)), divisor) + 7.5
    # The addition rounds to the nearest integer, ties to even.
    code = tl.clamp((scaled + 12582912.0) - 12582912.0, 0.0, 15.0)
    code = tl.where(finite[:, None], code, 15.0).to(tl.int32)
    even, odd = tl.split(tl.reshape(code, (HEADS * DIMS // 2, 2)))
    return _finite_bytes(even | (odd << 4), HEADS * DIMS // 2), step


@jit
def _pack_levels(parts, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr):
    a, b, c, d = _four_of(parts, HEADS * DIMS)
    mean = ((a + b) + (c + d)) * 0.25
    halves = ((a + b) - (c + d)) * 0.25
    older = (a - b) * 0.5
    newer = (c - d) * 0.5
    of_mean = _row_power(mean, _LEVEL_DROPPED, HEAD_SIZE, HEADS, DIMS)
    of_halves = _row_power(halves, _LEVEL_DROPPED, HEAD_SIZE, HEADS, DIMS)
    of_older = _row_power(older, _LEVEL_DROPPED, HEAD_SIZE, HEADS, DIMS)
    of_newer = _row_power(newer, _LEVEL_DROPPED, HEAD_SIZE, HEADS, DIMS)
    finite = (of_mean <= LARGEST_FINITE) & (of_halves <= LARGEST_FINITE)
    finite = finite & (of_older <= LARGEST_FINITE) & (of_newer <= LARGEST_FINITE)
    first, first_step = _pack_in_pairs(mean, of_mean, finite, True, _LEVEL_SPACING, HEADS, DIMS)
    second, second_step = _pack_in_pairs(halves, of_halves, finite, False, _LEVEL_SPACING, HEADS, DIMS)
    third, third_step = _pack_in_pairs(older, of_older, finite, False, _LEVEL_SPACING, HEADS, DIMS)
    fourth, fourth_step = _pack_in_pairs(newer, of_newer, finite, False, _LEVEL_SPACING, HEADS, DIMS)
    return (first, second, third, fourth), (first_step, second_step, third_step, fourth_step)


@jit
def _quarters_from_levels(vectors, HEAD_SIZE: tl.constexpr):
    mean, halves, older, newer = vectors[0], vectors[1], vectors[2], vectors[3]
    return (
        (mean + halves) + older,
        (mean + halves) - older,
        (mean - halves) + newer,
        (mean - halves) - newer,
    )


class LeveledQuarters(StatisticsKind):
    """The quarters of a page as their mean and three differences, with four bits per element: the bytes of `Quarters`.

    Of quarters a, b, c and d the vectors are m = (a + b + c + d) / 4, u = ((a + b) - (c + d)) / 4, v = (a - b) / 2 and
    w = (c - d) / 2. Then a and b are m + u + v and m + u - v, and c and d are m - u + w and m - u - w.

        first level: q . m        score: q . m + max(q . u + |q . v|, |q . w| - q . u)

    A product beyond 2^100 stands for keys that are not finite. It counts as positive, so the page is read.
    """

    name = "leveled_quarters"
    codes = _LEVELS
    vectors = codes.vectors
    formats: ClassVar[tuple[RecordFormat, ...]] = ("int4",)
    is_leveled = True
    triton_summarise = _quarters_of
    triton_pack = _pack_levels
    triton_summary_keys = _quarters_from_levels

    @property
    def is_fused(self) -> bool:
        """See `StatisticsKind.is_fused`: the decode kernel scores both levels."""
        return True

    @staticmethod
    def summarise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `StatisticsKind.summarise`."""
        a, b, c, d = keys.unflatten(-2, (4, -1)).mean(dim=-2).unbind(dim=-2)
        return torch.stack([(a + b + c + d) / 4, ((a + b) - (c + d)) / 4, (a - b) / 2, (c - d) / 2], dim=-2), None

    @staticmethod
    def features(query: torch.Tensor, std_weight: float) -> torch.Tensor:
        """See `StatisticsKind.features`: the query, for every vector."""
        return query.unsqueeze(-2).expand(*query.shape[:-1], 4, query.shape[-1])

    @staticmethod
    def first_score(products: torch.Tensor) -> torch.Tensor:
        """See `StatisticsKind.first_score`."""
        return torch.where(products.abs() > _NOT_FINITE, products.abs(), products)

    @staticmethod
    def combine(products: torch.Tensor) -> torch.Tensor:
        """See `StatisticsKind.combine`: the largest of the four quarters."""
        m, u, v, w = products.unbind(dim=-1)
        return LeveledQuarters.first_score(m) + torch.maximum(u + v.abs(), w.abs() - u)

    @staticmethod
    def summary(vectors: torch.Tensor, spread: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `StatisticsKind.summary`: the quarters."""
        m, u, v, w = vectors.unbind(dim=-2)
        return torch.stack([m + u + v, m + u - v, m - u + w, m - u - w], dim=-2), spread
