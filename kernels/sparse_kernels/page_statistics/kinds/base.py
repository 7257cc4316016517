"""What a kind of page statistics is: what is kept of a page's keys, and how a query scores it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class StatisticsKind(ABC):
    """What is kept of a page's keys, and how a query scores it.

    A record holds `vectors` vectors x_1..x_V of the size of a head and, if `has_spread`, a scalar y. The score of a
    page for a query head q is

        s(q) = combine(phi_1(q) . x_1, ..., phi_V(q) . x_V) + lambda ||q||_2 y

    where phi are the query's `features`. Records follow from the page's keys alone, whatever their order, so they can be
    computed when a page fills and again whenever it is rewritten.
    """

    name: ClassVar[str]
    """Name in `KINDS`."""
    vectors: ClassVar[int] = 1
    """Vectors in a record."""
    has_spread: ClassVar[bool] = False
    """Whether a record holds a scalar besides its vectors."""
    formats: ClassVar[tuple[str, ...]] = ("int8", "fp8", "bf16")
    """How its vectors can be stored, of the layout's formats."""

    @staticmethod
    @abstractmethod
    def summarise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The record of each page.

        Args:
            keys: `[..., page_size, head_size]` float64: the order of a sum then does not show once it is rounded.

        Returns:
            The vectors `[..., vectors, head_size]` and, if the kind has one, the spread `[...]`.
        """

    @staticmethod
    def features(query: torch.Tensor, std_weight: float) -> torch.Tensor:
        """What the vectors of a record are multiplied with, phi: by default the query.

        Args:
            query: `[..., head_size]` float32.
            std_weight: lambda.

        Returns:
            `[..., vectors, head_size]` float32.
        """
        return query.unsqueeze(-2)

    @staticmethod
    def combine(products: torch.Tensor) -> torch.Tensor:
        """Makes one number of the products of features and vectors: by default their sum.

        Args:
            products: `[..., vectors]` float32.

        Returns:
            `[...]` float32.
        """
        return products.sum(dim=-1)

    @property
    def is_linear(self) -> bool:
        """Whether the score is linear in the record, which is what the compiled scores of a CPU can do."""
        return type(self).combine is StatisticsKind.combine
