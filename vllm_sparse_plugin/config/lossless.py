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
    """Tokens of a draft; the most if `draft_length` is `adaptive`."""
    draft_length: Literal["fixed", "adaptive"] = "adaptive"
    """`adaptive`: 0 to `draft_tokens`, by acceptance and step times. `fixed`: `draft_tokens`, so that seeds repeat."""
    min_context_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 8192
    """Shorter contexts, and contexts that a draft would read whole, decode densely without drafts."""
    score_every: Annotated[int, Field(ge=1, le=64)] = 1
    """Tokens of a draft that read pages of one choice; 1: each token chooses its pages."""


@dataclass(frozen=True)
class DraftRule:
    """How many tokens are drafted for a request, from lengths alone."""

    draft_tokens: int
    """Tokens of a draft at most."""
    min_context_tokens: int
    """Shortest context that is drafted for."""
    is_adaptive: bool = False
    """Whether fewer are where that is faster, see `lossless.pace`."""
    score_every: int = 1
    """Steps of a draft that read pages of one choice."""

    @property
    def step_lengths(self) -> tuple[int, ...]:
        """Lengths of the drafts of a step on a GPU, where each length has CUDA graphs of its own: none and the longest,
        and its quarters if the length adapts."""
        counts = (0, 1, 2, 3, 4) if self.is_adaptive else (0, 4)
        return tuple(sorted({self.draft_tokens * count // 4 for count in counts}))

    @property
    def keeps_pages(self) -> bool:
        """Whether steps of a draft read pages that an earlier step has chosen."""
        return min(self.score_every, self.draft_tokens) > 1

    def chooses_pages(self, index: int) -> bool:
        """Returns whether a step of a draft, by its index, chooses pages."""
        return index % self.score_every == 0

    def next_pages(self, page_size: int) -> int:
        """Returns how many pages a context may complete between two choices."""
        return -(-(min(self.score_every, self.draft_tokens) - 1) // page_size)

    def covers(self, context_tokens: int) -> bool:
        """Returns whether a context of so many tokens is long enough to draft for."""
        return context_tokens >= self.min_context_tokens

    def drafts(self, context_tokens: int, reserved_tokens: int, longest: int) -> int:
        """Returns how many tokens may be drafted.

        Args:
            context_tokens: tokens of the request that are known, the newest of which has no keys yet.
            reserved_tokens: tokens that its blocks hold. The first drafting step writes the keys of the newest token,
                each later one those of the draft before it.
            longest: tokens of the longest context that the engine serves.
        """
        if not self.covers(context_tokens):
            return 0
        return max(0, min(self.draft_tokens, reserved_tokens - context_tokens + 1, longest - context_tokens - 1))
