"""ZipVL (arXiv 2410.08584) keeps the tokens that some probe rows attend to most."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from vllm_sparse_plugin.evictions.base import COMPACTIONS, Compaction

if TYPE_CHECKING:
    from sparse_kernels.compaction import CompactionRule


@COMPACTIONS.built_in
class ZipVLCompaction(Compaction):
    """ZipVL (arXiv 2410.08584) at the end of a prompt: each layer keeps the keys and values of the tokens with the
    largest attention of some probe rows, divided by the number of rows that see the token. A budget says how many."""

    every_query_votes = True
    method: Literal["zipvl"] = "zipvl"
    """Name of the method."""
    recent_probes: Annotated[int, Field(ge=1, le=4096)] = 64
    """Newest tokens of the prompt that are probe rows."""
    random_probes: Annotated[int, Field(ge=0, le=4096)] = 64
    """Earlier tokens, drawn at random, that are probe rows too."""
    seed: Annotated[int, Field(ge=0, le=(1 << 32) - 1)] = 0
    """Seed of the draw."""

    @property
    def window(self) -> int:
        return 1

    def rule(self) -> CompactionRule | None:
        """Returns the rule of H2O for the votes of the probe rows alone."""
        from sparse_kernels.token_prefill import TokenRule

        rule = super().rule()
        assert rule is not None
        probes = TokenRule(recent_probes=self.recent_probes, random_probes=self.random_probes, seed=self.seed)
        return replace(rule, probes=probes)
