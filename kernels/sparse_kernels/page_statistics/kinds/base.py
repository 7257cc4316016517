"""The interface of a kind of page statistics: the record stored per page, and how a query scores it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch

from sparse_kernels.formats import StatisticsFormat
from sparse_kernels.optional_triton import constexpr, jit, tl
from sparse_kernels.page_statistics.codes import LARGEST_BF16, Codes

RecordFormat = StatisticsFormat | Literal["int2", "int4"]
"""Formats of a record. Only some kinds have int2 or int4 codes."""
LARGEST_FINITE = constexpr(LARGEST_BF16)
"""`LARGEST_BF16` as a constant for Triton functions."""


@jit
def finite_or(x, replacement):
    """Returns `x`, or `replacement` where `x` exceeds the finite bfloat16 numbers."""
    return tl.where(tl.abs(x) <= LARGEST_FINITE, x, replacement)


@jit
def query_itself(query, std_weight):
    """Returns the features of most kinds: the query itself."""
    return (query,)


@jit
def keys_as_stored(vectors, HEAD_SIZE: tl.constexpr):
    """Returns the summary keys of kinds whose vectors are keys: the vectors themselves."""
    return vectors


@jit
def spread_as_stored(vectors, spread):
    """Returns the summary's spread of kinds that store a spread."""
    return spread


class StatisticsKind(ABC):
    """A kind defines the record stored per page, and how a query scores it.

    A record holds `vectors` vectors x_1..x_V of the size of a head and, if `has_spread`, a scalar y. The score of a
    page for a query head q is

        s(q) = combine(phi_1(q) . x_1, ..., phi_V(q) . x_V) + lambda ||q||_2 y

    where phi are the query's `features`. A record depends only on the page's keys. It is computed when a page fills,
    and again whenever the page is rewritten.
    """

    name: ClassVar[str]
    """Name in `KINDS`."""
    vectors: ClassVar[int] = 1
    """Vectors in a record."""
    has_spread: ClassVar[bool] = False
    """Whether a record holds a scalar in addition to its vectors."""
    formats: ClassVar[tuple[RecordFormat, ...]] = ("int8", "fp8", "bf16")
    """Formats that its vectors can be stored in."""
    codes: ClassVar[Codes | None] = None
    """How its vectors are packed in its only format, of less than 8 bits; None for other kinds."""
    is_leveled: ClassVar[bool] = False
    """Whether the first vector of a record alone tells which records are read whole. The first vectors of all pages of
    a block then lie before the other vectors; see `page_score`."""
    triton_summarise: ClassVar[Any] = None
    """`summarise` in Triton, for `page_statistics.triton`: `(keys, PAGE_SIZE, HEADS, DIMS)` to a tuple of the vectors,
    `[HEADS * DIMS]` each, and the spread `[HEADS]` if there is one; for codes to the argument of `triton_pack`. Keys
    are `[PAGE_SIZE, HEADS * DIMS]` float32, newest first, zero beyond the head size. The results are finite for all
    keys (see `StatisticsLayout`)."""
    triton_features: ClassVar[Any] = query_itself
    """`features` in Triton, for `page_score.triton`: `(query, std_weight)` to a tuple of float32 factors of the
    vectors, in the query's shape."""
    triton_pack: ClassVar[Any] = None
    """`codes.pack` in Triton: `(record, HEAD_SIZE, HEADS, DIMS)` to a tuple of the rows of bytes, `[HEADS * DIMS]`
    each, and a tuple of their steps, `[HEADS]` bfloat16."""
    triton_summary_keys: ClassVar[Any] = keys_as_stored
    """The keys of `summary` in Triton: `(vectors, HEAD_SIZE)`, with a tuple of `[PAGES, DIMS]`, to a tuple of keys."""
    triton_summary_spread: ClassVar[Any] = spread_as_stored
    """The spread of `summary` in Triton: `(vectors, spread)` to `[PAGES]`; the argument is None if none is stored."""
    triton_combine: ClassVar[Any] = None
    """`combine` in Triton: a tuple of float32 products to one tensor; None for their sum."""

    @staticmethod
    @abstractmethod
    def summarise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the record of each page.

        Args:
            keys: `[..., page_size, head_size]` float64, so that the order of a sum does not change the rounded result.

        Returns:
            The vectors `[..., vectors, head_size]` and the spread `[...]`, None for a kind without a spread.
        """

    @staticmethod
    def features(query: torch.Tensor, std_weight: float) -> torch.Tensor:
        """Returns phi, the factors of a record's vectors; by default the query.

        Args:
            query: `[..., head_size]` float32.
            std_weight: lambda.

        Returns:
            `[..., vectors, head_size]` float32.
        """
        return query.unsqueeze(-2)

    @staticmethod
    def combine(products: torch.Tensor) -> torch.Tensor:
        """Reduces the products of features and vectors to one score; by default their sum.

        Args:
            products: `[..., vectors]` float32.

        Returns:
            `[...]` float32.
        """
        return products.sum(dim=-1)

    @staticmethod
    def summary(vectors: torch.Tensor, spread: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the keys that represent a page in sparse prefill, and the spread of its keys around them.

        Args:
            vectors: `[..., vectors, head_size]` float32, times their scales.
            spread: `[...]` float32, or None.

        Returns:
            `[..., summary_keys, head_size]` and `[...]` or None, float32.
        """
        return vectors, spread

    @staticmethod
    def first_score(products: torch.Tensor) -> torch.Tensor:
        """Returns the score of the first level, if `is_leveled`, from the products of features and first vectors."""
        raise NotImplementedError

    @property
    def summary_keys(self) -> int:
        """Keys of a page's `summary`."""
        return self.vectors

    @property
    def summary_has_spread(self) -> bool:
        """Whether a page's `summary` has a spread."""
        return self.has_spread

    @property
    def runs_on_gpu(self) -> bool:
        """Whether a GPU can write and score records of this kind."""
        kind = type(self)
        scored = (kind.features is StatisticsKind.features) == (kind.triton_features is query_itself) and (
            kind.combine is StatisticsKind.combine
        ) == (kind.triton_combine is None)
        return kind.triton_summarise is not None and (self.is_fused or scored)

    @property
    def is_fused(self) -> bool:
        """Whether the CUDA decode kernels score records of this kind; by default, one vector times the query."""
        return self.vectors == 1 and type(self).features is StatisticsKind.features and self.is_linear

    @property
    def is_linear(self) -> bool:
        """Whether the score is linear in the record, as the compiled CPU scores require."""
        return type(self).combine is StatisticsKind.combine
