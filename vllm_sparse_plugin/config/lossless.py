"""The settings of lossless mode: sparse steps draft, dense attention verifies them and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from vllm_sparse_plugin.policies.base import Section


class Lossless(Section):
    """The model drafts for itself with sparse attention, and verifies its drafts with dense attention: tokens are those
    of dense decoding. Prompts attend densely, too."""

    draft_tokens: Annotated[int, Field(ge=1, le=64)] = 8
    """Tokens that are drafted, one after the other, for each that dense attention is certain to make; where
    their length is adaptive, at most."""
    draft_length: Literal["fixed", "adaptive"] = "fixed"
    """`fixed`: drafts have so many tokens. `adaptive`: they are as long as pays, down to none at all, by the acceptance
    and the times of the latest steps. Now and then a step goes without drafts, or with the longest, to see whether that
    would be faster by now."""
    min_context_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 8192
    """Shortest context that is drafted for. Shorter ones decode densely, one token at a time: there a draft takes
    about as long as what it saves. Contexts that a draft would read whole are never drafted for."""


@dataclass(frozen=True)
class DraftRule:
    """How many tokens are drafted for a request, from lengths alone."""

    draft_tokens: int
    """Tokens of a draft at most."""
    min_context_tokens: int
    """Shortest context that is drafted for."""
    is_adaptive: bool = False
    """Whether fewer are where that is faster, see `lossless.pace`."""

    def drafts(self, context_tokens: int, reserved_tokens: int, longest: int) -> int:
        """Returns how many tokens may be drafted.

        Args:
            context_tokens: tokens of the request that are known, the newest of which has no keys yet.
            reserved_tokens: tokens that its blocks hold. The first drafting step writes the keys of the newest token,
                each later one those of the draft before it.
            longest: tokens of the longest context that the engine serves.
        """
        if context_tokens < self.min_context_tokens:
            return 0
        return max(0, min(self.draft_tokens, reserved_tokens - context_tokens + 1, longest - context_tokens - 1))
