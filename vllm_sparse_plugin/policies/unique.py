"""UNIQUE (arXiv 2605.27740): the pages whose statistics match the query best."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from sparse_kernels.page_statistics import KINDS, StatisticsLayout

from vllm_sparse_plugin.policies.scored import ScoredSelection


class UniqueSelection(ScoredSelection):
    """UNIQUE: score every page by small statistics of its keys, read the best ones."""

    statistics_kind = "mean_and_spread"
    statistics: Literal["sketch", "int8", "fp8", "bf16"] = "int8"  # type: ignore[assignment]
    """What is kept of a page's keys: the paper's mean and standard deviation, the mean in `int8` or `fp8` with one
    scale per page or in `bf16`, which needs blocks of a multiple of 64 tokens; or a `sketch`, the means of its quarters
    in two bits an element. A sketch takes the bytes of an int8 mean and finds single keys that a mean hides, but loses
    keys that differ little beside what they have in common."""
    policy: Literal["unique"] = "unique"
    """Name of the selection policy."""
    lambda_: Annotated[float, Field(alias="lambda", ge=0.0, le=16.0)] = 1.0
    """Weight of the standard deviation in a page's score (the paper's lambda, Eq. 3); sketches have none."""

    @property
    def std_weight(self) -> float:
        return 0.0 if self.statistics == "sketch" else self.lambda_

    def statistics_layout(self, head_size: int, cache_itemsize: int) -> StatisticsLayout:
        if self.statistics == "sketch":
            return StatisticsLayout(self.page_size, head_size, "int2", cache_itemsize, KINDS["sketch"])
        return StatisticsLayout(self.page_size, head_size, self.statistics, cache_itemsize)
