"""H2O (arXiv 2306.14048) keeps the newest tokens, and those that all queries attend to most."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vllm_sparse_plugin.evictions.base import COMPACTIONS, RepeatedCompaction


@COMPACTIONS.built_in
class H2OCompaction(RepeatedCompaction):
    """H2O (arXiv 2306.14048): each KV head keeps the tokens that all queries so far have attended to most, the heavy
    hitters, and the newest ones. Without `every` it evicts at the end of the prompt, and what is decoded is kept."""

    every_query_votes = True
    method: Literal["h2o"] = "h2o"
    """Name of the method."""
    recent_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Share of the budget for the newest tokens; sinks and chosen tokens share the rest."""

    @property
    def recent_part(self) -> float:
        return self.recent_share
