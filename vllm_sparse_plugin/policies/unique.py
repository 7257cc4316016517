"""UNIQUE (arXiv 2605.27740): the pages whose mean key, plus a bonus for spread, matches the query best."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vllm_sparse_plugin.policies.scored import ScoredSelection


class UniqueSelection(ScoredSelection):
    """UNIQUE: score every page by mean and standard deviation of its keys, read the best ones."""

    statistics_kind = "mean_and_spread"
    policy: Literal["unique"] = "unique"
    """Name of the selection policy."""
    lambda_: Annotated[float, Field(alias="lambda", ge=0.0, le=16.0)] = 0.75
    """Weight of the standard deviation in a page's score (the paper's lambda, Eq. 3)."""

    @property
    def std_weight(self) -> float:
        return self.lambda_
