"""UNIQUE (arXiv 2605.27740) reads the pages whose statistics match the query best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from vllm_sparse_plugin.policies.scored import ScoredSelection

if TYPE_CHECKING:
    from sparse_kernels.page_statistics import StatisticsLayout


class UniqueSelection(ScoredSelection):
    """UNIQUE: score every page by small statistics of its keys, read the best ones."""

    statistics_kind = "mean_and_spread"
    departure = (
        "By default it scores the means of a page's quarters in place of the paper's mean and standard deviation, and "
        "always reads the newest complete page; the preset unique_paper does what was published."
    )
    statistics: Literal["auto", "quarters", "sketch", "int8", "fp8", "bf16"] = "auto"  # type: ignore[assignment]
    """What is kept of a page's keys. The paper's mean and standard deviation, the mean in `int8` or `fp8` with one
    scale per page or in `bf16`, which needs blocks of a multiple of 64 tokens. Or the means of the page's `quarters` in
    four bits an element, which find single keys that a mean over the page hides, in the bytes of a bf16 mean. Or a
    `sketch`, the quarters in two bits: as small as an int8 mean, but lost on keys with outlying channels. `auto` takes
    quarters, and int8 in an 8-bit KV cache, where quarters would add an eighth to it."""
    policy: Literal["unique"] = "unique"
    """Name of the selection policy."""
    lambda_: Annotated[float, Field(alias="lambda", ge=0.0, le=16.0)] = 1.0
    """Weight of the standard deviation in a page's score (the paper's lambda, Eq. 3), where there is one: with int8,
    fp8 and bf16."""

    @property
    def std_weight(self) -> float:
        return self.lambda_

    def statistics_in(self, cache_itemsize: int) -> Literal["quarters", "sketch", "int8", "fp8", "bf16"]:
        """Returns `statistics`; for `auto` what it stands for.

        Args:
            cache_itemsize: bytes of an element of the KV cache.
        """
        if self.statistics == "auto":
            return "quarters" if cache_itemsize > 1 else "int8"
        return self.statistics

    def statistics_layout(self, head_size: int, cache_itemsize: int) -> StatisticsLayout:
        from sparse_kernels.page_statistics import KINDS, StatisticsLayout

        statistics = self.statistics_in(cache_itemsize)
        if statistics == "quarters" or statistics == "sketch":
            kind = KINDS[statistics]
            return StatisticsLayout(self.page_size, head_size, kind.formats[0], cache_itemsize, kind)
        return StatisticsLayout(self.page_size, head_size, statistics, cache_itemsize)
