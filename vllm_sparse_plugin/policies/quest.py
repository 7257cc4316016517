"""Quest (arXiv 2406.10774) reads the pages that can hold the key that matches the query best."""

from __future__ import annotations

from typing import Literal

from vllm_sparse_plugin.policies.scored import ScoredSelection


class QuestSelection(ScoredSelection):
    """Quest: score every page by the largest logit that the bounds of its keys allow, read the best ones.

    The score is `sum_d max(q_d m_d, q_d M_d)` of the least and largest elements m and M of a page's keys;
    `sparse_kernels.page_statistics.kinds.bounds` has it.

    The paper has pages of 16 tokens and leaves the first two layers dense (`page_size`, `first_dense_layers`), chooses
    pages per query head, and reserves none; here, as under every policy, a KV head's choice is that of the best of its
    query heads, and the first and the newest page are read always.
    """

    statistics_kind = "bounds"
    departure = (
        "The bounds of a page's keys are rounded to 8 bits, so they no longer bound exactly; `statistics: bf16` keeps "
        "them in 16. Pages are chosen per KV head, and the first and the newest complete page are always read."
    )
    policy: Literal["quest"] = "quest"
    """Name of the selection policy."""
