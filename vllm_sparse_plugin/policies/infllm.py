"""InfLLM (arXiv 2402.04617): the pages whose representative keys match the query best."""

from __future__ import annotations

from typing import Literal

from vllm_sparse_plugin.policies.scored import ScoredSelection


class InfLLMSelection(ScoredSelection):
    """In the style of InfLLM: score every page by a few of its keys that stand for all, read the best ones.

    `sparse_kernels.page_statistics.kinds.representatives` says which keys, and where that leaves the paper. The paper's
    local window is `recent_pages`, its initial tokens are `sink_pages`; it works on blocks of 128 tokens and gives
    distant ones a position of their own, here pages are small and every key keeps its position.
    """

    statistics_kind = "representatives"
    policy: Literal["infllm"] = "infllm"
    """Name of the selection policy."""
