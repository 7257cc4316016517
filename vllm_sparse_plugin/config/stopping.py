"""Settings of ART: when a decode step stops reading (arXiv 2606.00024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from vllm_sparse_plugin.policies.base import Policy, Section, Selection
from vllm_sparse_plugin.policies.dense import DensePolicy

if TYPE_CHECKING:
    from sparse_kernels.stopping import StopRule


class Stopping(Section):
    """ART: read selected pages in test intervals and stop when the output no longer changes.

    The incomplete last page is read first. A scored policy then reads the pages that are always read, then the best
    scores first. Other policies read the sink pages, then the newest pages first. The probe is 32 evenly spread
    elements of each query head's output. The query heads of a KV head stop together. See `StopRule`.
    """

    scale_tolerance: Annotated[float, Field(ge=0.0, le=1000.0)] = 1e-5
    """Largest change of the probe's norm in a stable test interval (tau in the paper)."""
    direction_tolerance: Annotated[float, Field(ge=0.0, le=16.0)] = 1e-3
    """Largest change of the probe's direction, 1 - cosine, in a stable test interval (phi in the paper)."""
    patience: Annotated[int, Field(ge=0, le=1 << 20)] = 5
    """Consecutive stable test intervals before a step stops (p in the paper); 0: never stop."""
    block_tokens: Literal["auto", 64, 128, 256, 512, 1024] = "auto"
    """Tokens of a test interval. `auto`: 512 with the policy `dense`, otherwise 64."""
    dense_sink_pages: Annotated[int, Field(ge=0, le=64)] = 1
    """With the policy `dense`: first pages of 16 tokens, read before the newest; not in the paper."""
    dense_order: Literal["newest", "votes"] = "newest"
    """With the policy `dense`: what follows the first pages. `votes`: newest tokens, then those with most votes."""

    def rule(self, selection: Selection) -> StopRule:
        """Returns the rule for the pages that a policy selects."""
        from sparse_kernels.stopping import StopRule

        block_tokens = self.block_tokens_of(selection)
        return StopRule(
            self.scale_tolerance, self.direction_tolerance, self.patience, block_tokens, selection.reserved_pages
        )

    def block_tokens_of(self, selection: Policy) -> int:
        """Returns `block_tokens`, with `auto` replaced by its number for a policy."""
        if self.block_tokens != "auto":
            return self.block_tokens
        return 512 if selection.name() == DensePolicy.name() else 64
