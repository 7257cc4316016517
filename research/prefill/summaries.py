"""Summaries of pages: what a rule makes of the statistics that the cache stores, and how a query meets them.

A summary is a few vectors mu of the size of a head with a spread sigma each. A query gives a vector

    q . mu + weight * ||q|| * sigma

which is one product of (q, weight * ||q||) and (mu, sigma): `features` makes the first, `summarise` the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from sparse_kernels.page_statistics import KINDS
from sparse_kernels.page_statistics.kinds import StatisticsKind
from sparse_kernels.page_statistics.kinds.base import RecordFormat
from sparse_kernels.page_statistics.kinds.quarters import rotate
from sparse_kernels.page_statistics.reference import quantise, summarise

PAGE = 8
"""Tokens of a page, as `unique` has them."""
BLOCK = 64
"""Tokens of a block."""


def read_back(
    kind: StatisticsKind, record_format: RecordFormat, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a cache gives back of the records of pages.

    Args:
        kind: what a record holds.
        record_format: how its vectors are stored.
        keys: `[..., num_pages, page_size, head_size]` float32.

    Returns:
        The vectors `[..., num_pages, kind.vectors, head_size]` and the spread `[..., num_pages]`, zero if a record has
        none, float32.
    """
    vectors, spread = summarise(kind, keys)
    if kind.codes:
        packed, steps = kind.codes.pack(vectors)
        vectors = kind.codes.unpack(packed) * kind.codes.per_vector(steps.float()).unsqueeze(-1)
    elif record_format == "bf16":
        vectors = vectors.bfloat16().float()
    else:
        codes, scale = quantise(vectors, torch.int8 if record_format == "int8" else torch.float8_e4m3fn)
        vectors = codes.float() * scale.float().unsqueeze(-1)
    return vectors, vectors.new_zeros(vectors.shape[:-2]) if spread is None else spread.bfloat16().float()


def with_spread(vectors: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Vectors `[..., size]` with their spread `[...]` as one more element."""
    return torch.cat([vectors, spread.unsqueeze(-1)], dim=-1)


@dataclass(frozen=True)
class Summary:
    """One way to summarise a page."""

    page_size: ClassVar[int] = PAGE

    @property
    def label(self) -> str:
        """Name in result files."""
        raise NotImplementedError

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        """The vectors of pages with their spreads.

        Args:
            keys: `[..., num_pages, page_size, head_size]` float32 that bfloat16 can hold.

        Returns:
            `[..., num_pages, num_vectors, num_features]` float32.
        """
        raise NotImplementedError

    def features(self, query: torch.Tensor, weight: float) -> torch.Tensor:
        """What the vectors are multiplied with: `[..., head_size]` to `[..., num_features]`."""
        return with_spread(query, weight * query.norm(dim=-1))


@dataclass(frozen=True)
class Quarters(Summary):
    """The quarters of a page as `quarters` or `sketch` stores them, in `vectors` groups of their mean and deviation.

    sigma is the norm of the population's standard deviation, per dimension, over the quarters of a group; a group of
    one quarter has none.
    """

    statistics: str = "quarters"
    vectors: int = 1
    squared: bool = False
    """Whether sigma enters as the second-order expansion of the page's mass has it: for keys that deviate alike in all
    directions log mean exp(q . k / sqrt(D)) = (q . mu + weight ||q||^2 sigma^2 / D^(3/2)) / sqrt(D), weight 1/2."""

    @property
    def label(self) -> str:
        return f"{self.statistics}{self.vectors}{'-squared' * self.squared}"

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        kind = KINDS[self.statistics]
        quarters, _ = read_back(kind, kind.formats[0], keys)
        grouped = quarters.unflatten(-2, (self.vectors, -1))
        variance = grouped.var(dim=-2, correction=0).sum(dim=-1)
        return with_spread(grouped.mean(dim=-2), variance if self.squared else variance.sqrt())

    def features(self, query: torch.Tensor, weight: float) -> torch.Tensor:
        turned = rotate(query) if self.statistics == "sketch" else query
        norm = query.norm(dim=-1)
        return with_spread(turned, weight * (norm.square() / query.shape[-1] ** 1.5 if self.squared else norm))


@dataclass(frozen=True)
class MeanAndSpread(Summary):
    """UNIQUE's record: the mean key and its scalar deviation."""

    format: RecordFormat = "int8"

    @property
    def label(self) -> str:
        return f"unique-{self.format}"

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        vectors, spread = read_back(KINDS["mean_and_spread"], self.format, keys)
        return with_spread(vectors, spread.unsqueeze(-1))


@dataclass(frozen=True)
class Representatives(Summary):
    """InfLLM's record: the mean of the page's representative keys, without a spread."""

    format: RecordFormat = "int8"

    @property
    def label(self) -> str:
        return f"representatives-{self.format}"

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        vectors, spread = read_back(KINDS["representatives"], self.format, keys)
        return with_spread(vectors, spread.unsqueeze(-1))


@dataclass(frozen=True)
class Box(Summary):
    """Quest's record as a mean and a spread: mu = (M + m) / 2 and sigma = ||M - m|| / 2."""

    format: RecordFormat = "int8"

    @property
    def label(self) -> str:
        return f"box-{self.format}"

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        most, least = self.bounds(keys)
        return with_spread((most + least) / 2, (most - least).norm(dim=-1) / 2).unsqueeze(-2)

    def bounds(self, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The largest and the least element in each dimension, as stored: `[..., num_pages, head_size]` each."""
        vectors, _ = read_back(KINDS["bounds"], self.format, keys)
        return vectors.unbind(dim=-2)


@dataclass(frozen=True)
class Bounds(Box):
    """Quest's record with its own score, max(q, 0) . M + min(q, 0) . m; a weight has no effect."""

    @property
    def label(self) -> str:
        return f"quest-{self.format}"

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.bounds(keys), dim=-1).unsqueeze(-2)

    def features(self, query: torch.Tensor, weight: float) -> torch.Tensor:
        return torch.cat([query.clamp(min=0), query.clamp(max=0)], dim=-1)


@dataclass(frozen=True)
class Keys(Summary):
    """The keys themselves, which no summary can beat: pages of one token."""

    page_size: ClassVar[int] = 1

    @property
    def label(self) -> str:
        return "keys"

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        return keys

    def features(self, query: torch.Tensor, weight: float) -> torch.Tensor:
        return query


@dataclass(frozen=True)
class BlockMean(Keys):
    """The mean key of a whole block, as FlashPrefill and MInference's block mode take it."""

    page_size: ClassVar[int] = BLOCK

    @property
    def label(self) -> str:
        return "block-mean"

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.mean(dim=-2, keepdim=True)
