"""Reads the pages whose mean key, or whose mean representative key, matches the query best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vllm_sparse_plugin.policies.base import POLICIES
from vllm_sparse_plugin.policies.scored import ScoredSelection

if TYPE_CHECKING:
    from sparse_kernels.page_statistics import StatisticsLayout


@POLICIES.built_in
class MeanSelection(ScoredSelection):
    """Score every page by the mean of its keys or of a few representative keys, read the best ones.

    `keys: all` is the baseline for UNIQUE's offset: the records of UNIQUE, whose spread has no weight.

    `keys: representative` is in the style of InfLLM (arXiv 2402.04617). In the paper, the representatives are the keys
    with most attention from later queries. Here they are the keys with the largest product with their page's mean,
    since a page's statistics depend only on its keys (`sparse_kernels.page_statistics.kinds.representatives`). The
    paper's local window is `recent_pages`, its initial tokens are `sink_pages`. The paper uses blocks of 128 tokens and
    gives distant blocks a special position. Here pages are small and every key keeps its position.
    """

    statistics_kind = "mean_and_spread"
    departure = (
        "Representative keys are those that agree most with their page's own mean, not, as in InfLLM's paper, those "
        "that the queries after them attend to most; accuracy measured here is not that of InfLLM as published."
    )
    policy: Literal["mean"] = "mean"
    """Name of the selection policy."""
    keys: Literal["all", "representative"] = "all"
    """The keys of a page whose mean is scored."""

    def statistics_layout(self, head_size: int, cache_itemsize: int) -> StatisticsLayout:
        from sparse_kernels.page_statistics import KINDS, StatisticsLayout

        kind = KINDS["representatives" if self.keys == "representative" else "mean_and_spread"]
        return StatisticsLayout(self.page_size, head_size, self.statistics, cache_itemsize, kind)
