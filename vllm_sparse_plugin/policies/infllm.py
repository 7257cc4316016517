"""InfLLM (arXiv 2402.04617) reads the pages whose representative keys match the query best."""

from __future__ import annotations

from typing import Literal

from vllm_sparse_plugin.policies.scored import ScoredSelection


class InfLLMSelection(ScoredSelection):
    """In the style of InfLLM: score every page by the mean of a few representative keys, read the best ones.

    In the paper, the representatives are the keys with most attention from later queries. Here they are the keys with
    the largest product with their page's mean, since a page's statistics depend only on its keys
    (`sparse_kernels.page_statistics.kinds.representatives`). The paper's local window is `recent_pages`, its initial
    tokens are `sink_pages`. The paper uses blocks of 128 tokens and gives distant blocks a special position. Here pages
    are small and every key keeps its position.
    """

    statistics_kind = "representatives"
    departure = (
        "Representative keys are those that agree most with their page's own mean, not, as in the paper, those that "
        "the queries after them attend to most; accuracy measured here is not that of InfLLM as published."
    )
    policy: Literal["infllm"] = "infllm"
    """Name of the selection policy."""
