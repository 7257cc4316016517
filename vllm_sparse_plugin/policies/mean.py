"""UNIQUE without its offset: reads the pages whose mean key matches the query best."""

from __future__ import annotations

from typing import Literal

from vllm_sparse_plugin.policies.scored import ScoredSelection


class MeanSelection(ScoredSelection):
    """Score every page by its mean key only, read the best ones: the baseline for UNIQUE's offset.

    Its records are those of UNIQUE; their spread has no weight.
    """

    statistics_kind = "mean_and_spread"
    policy: Literal["mean"] = "mean"
    """Name of the selection policy."""
