"""Quest (arXiv 2406.10774) reads the pages with the largest upper bound on a logit."""

from __future__ import annotations

from typing import Literal

from vllm_sparse_plugin.policies.base import POLICIES
from vllm_sparse_plugin.policies.scored import ScoredSelection


@POLICIES.built_in
class QuestSelection(ScoredSelection):
    """Quest: score every page by the largest logit that the bounds of its keys allow, read the best ones.

    The score is `sum_d max(q_d m_d, q_d M_d)` of the smallest and largest elements m and M of a page's keys; see
    `sparse_kernels.page_statistics.kinds.bounds`.

    The paper uses pages of 16 tokens, leaves the first two layers dense (`page_size`, `first_dense_layers`), chooses
    pages per query head, and always reads none. Here, as in every policy, a KV head reads the choice of its best query
    head, and always the first and the newest page.
    """

    statistics_kind = "bounds"
    departure = (
        "The bounds of a page's keys are rounded to 8 bits, so they no longer bound exactly; `statistics: bf16` keeps "
        "them in 16. Pages are chosen per KV head, and the first and the newest complete page are always read."
    )
    policy: Literal["quest"] = "quest"
    """Name of the selection policy."""
