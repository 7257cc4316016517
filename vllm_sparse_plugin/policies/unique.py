"""UNIQUE (arXiv 2605.27740) reads the pages whose statistics match the query best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from sparse_kernels.limits import MAX_K

from vllm_sparse_plugin.policies.base import POLICIES
from vllm_sparse_plugin.policies.scored import ScoredSelection

if TYPE_CHECKING:
    from sparse_kernels.page_statistics import StatisticsLayout


CODES = ("quarters", "sketch", "leveled_quarters")
"""Statistics that are keys with a few bits per element: they have no deviation."""
LEVELED = "leveled_quarters"
"""Statistics of which a first level tells which pages are scored whole."""
_REFINED = 0.25


@POLICIES.built_in
class UniqueSelection(ScoredSelection):
    """UNIQUE: score every page by small statistics of its keys, read the best ones."""

    statistics_kind = "mean_and_spread"
    departure = (
        "By default it scores the means of a page's quarters in place of the paper's mean and standard deviation, and "
        "always reads the newest complete page; the preset unique_paper does neither."
    )
    statistics: Literal["auto", "quarters", "sketch", "leveled_quarters", "int8", "fp8", "bf16"] = "auto"  # type: ignore[assignment]
    """Statistics of a page's keys; `auto` is `quarters`, or `int8` in an 8-bit cache."""
    policy: Literal["unique"] = "unique"
    """Name of the selection policy."""
    budget_tokens: Annotated[int, Field(ge=8, le=1 << 20)] = 1024
    """Tokens of complete pages read per KV head; a multiple of `page_size`. Shorter contexts are dense."""
    lambda_: Annotated[float, Field(alias="lambda", ge=0.0, le=16.0)] = 1.0
    """Weight of the standard deviation in a page's score (lambda in Eq. 3), for `int8`, `fp8` and `bf16`."""

    refined: Annotated[float | None, Field(ge=0.01, le=1.0)] = None
    """Share of a long context's pages that `leveled_quarters` score whole; null: 0.25."""

    @model_validator(mode="after")
    def _levels_have_room(self) -> Self:
        if self.statistics != LEVELED:
            if self.refined is not None:
                raise PydanticCustomError(
                    "sentence",
                    "refined: got {refined} with statistics '{statistics}', allowed: with leveled_quarters",
                    {"refined": self.refined, "statistics": self.statistics},
                )
        elif self.budget_pages > MAX_K:
            raise PydanticCustomError(
                "sentence",
                "budget_tokens: got {got} with statistics '{statistics}', allowed: up to {most}",
                {"got": self.budget_tokens, "statistics": self.statistics, "most": MAX_K * self.page_size},
            )
        return self

    @property
    def std_weight(self) -> float:
        return self.lambda_

    @property
    def refined_share(self) -> float:
        if self.statistics != LEVELED:
            return 1.0
        return _REFINED if self.refined is None else self.refined

    def statistics_in(
        self, cache_itemsize: int
    ) -> Literal["quarters", "sketch", "leveled_quarters", "int8", "fp8", "bf16"]:
        """Returns `statistics`, with `auto` replaced.

        Args:
            cache_itemsize: bytes of an element of the KV cache.
        """
        if self.statistics == "auto":
            return "quarters" if cache_itemsize > 1 else "int8"
        return self.statistics

    def statistics_layout(self, head_size: int, cache_itemsize: int) -> StatisticsLayout:
        from sparse_kernels.page_statistics import KINDS, StatisticsLayout

        statistics = self.statistics_in(cache_itemsize)
        if statistics == "quarters" or statistics == "sketch" or statistics == "leveled_quarters":
            kind = KINDS[statistics]
            return StatisticsLayout(self.page_size, head_size, kind.formats[0], cache_itemsize, kind)
        return StatisticsLayout(self.page_size, head_size, statistics, cache_itemsize)
