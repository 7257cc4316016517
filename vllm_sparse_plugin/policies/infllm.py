"""InfLLM (arXiv 2402.04617) reads the pages whose representative keys match the query best."""

from __future__ import annotations

from typing import Literal

from vllm_sparse_plugin.policies.scored import ScoredSelection


class InfLLMSelection(ScoredSelection):
    """In the style of InfLLM: score every page by a few of its keys that stand for all, read the best ones.

    The paper takes for representatives the keys that the queries after them attend to most. Here they are the keys that
    agree most with their page's own mean, since a page's statistics follow from its keys alone
    (`sparse_kernels.page_statistics.kinds.representatives`). The paper's local window is `recent_pages`, its initial
    tokens are `sink_pages`; it works on blocks of 128 tokens and gives distant ones a position of their own, here pages
    are small and every key keeps its position.
    """

    statistics_kind = "representatives"
    departure = (
        "Representative keys are those that agree most with their page's own mean, not, as in the paper, those that "
        "the queries after them attend to most; accuracy measured here is not that of InfLLM as published."
    )
    policy: Literal["infllm"] = "infllm"
    """Name of the selection policy."""
