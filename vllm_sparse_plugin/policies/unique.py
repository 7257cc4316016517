"""UNIQUE (arXiv 2605.27740): the pages whose mean key, plus a bonus for spread, matches the query best."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_statistics import PageStatistics, StatisticsFormat, StatisticsLayout
from sparse_kernels.page_topk import select_pages

from vllm_sparse_plugin.policies.base import DecodeSettings, Selection


class UniqueSelection(Selection):
    """UNIQUE: score every page by mean and standard deviation of its keys, read the best ones."""

    policy: Literal["unique"] = "unique"
    """Name of the selection policy."""
    lambda_: Annotated[float, Field(alias="lambda", ge=0.0, le=16.0)] = 0.75
    """Weight of the standard deviation in a page's score (the paper's lambda, Eq. 3)."""
    recent_pages: Annotated[int, Field(ge=0, le=64)] = 1
    """Newest complete pages that are always read, within the budget. A token that begins a page has no other way to
    be sure of its neighbours."""
    statistics: StatisticsFormat = "int8"
    """How mean keys are stored: `int8` and `fp8` with one scale per page, or `bf16`, which needs blocks of a
    multiple of 64 tokens."""

    @property
    def reserved_pages(self) -> int:
        return self.sink_pages + self.recent_pages

    def statistics_layout(self, head_size: int, cache_itemsize: int) -> StatisticsLayout:
        return StatisticsLayout(self.page_size, head_size, self.statistics, cache_itemsize)

    def decode_settings(self) -> DecodeSettings:
        return DecodeSettings(self.budget_pages, self.sink_pages, self.recent_pages, self.lambda_)

    def select(
        self,
        query: torch.Tensor,
        statistics: PageStatistics | None,
        block_table: torch.Tensor,
        num_pages: torch.Tensor,
    ) -> torch.Tensor:
        assert statistics is not None
        scores = score_pages(query, statistics, block_table, num_pages, self.lambda_)
        return select_pages(scores, num_pages, self.budget_pages, self.sink_pages, self.recent_pages)
