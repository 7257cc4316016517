"""ART's rule says when attention stops (arXiv 2606.00024, Eq. 2 and 3)."""

from __future__ import annotations

from typing import NamedTuple

PROBE_SIZE = 32
"""Elements of an output that are watched, as many as a warp has lanes."""


class StopRule(NamedTuple):
    """Stop after `patience` consecutive stable blocks.

    o(t) is the attention of a query head over the blocks 1 to t, normalised; the probe x(t) is some of its elements.
    Block t is stable if ||x(t) - x(t-1)|| < `scale_tolerance` and 1 - cos(x(t), x(t-1)) < `direction_tolerance`. The
    first block never is, nor is one whose cosine has no value. The query heads of a KV head read the same blocks, so a
    block counts if it is stable for all of them. The paper has no word on groups.
    """

    scale_tolerance: float
    """The paper's tau."""
    direction_tolerance: float
    """The paper's phi; above 2 every direction passes."""
    patience: int
    """The paper's p; 0 never stops."""
    block_tokens: int
    """Tokens of complete pages between two stop tests; a multiple of the page size."""
    least_pages: int = 0
    """Pages at the front that are read whatever the outputs."""

    def check(self, page_size: int) -> None:
        """Raises ValueError unless a block of the rule holds whole pages."""
        if self.block_tokens < 1 or self.block_tokens % page_size:
            raise ValueError(f"block_tokens: got {self.block_tokens}, allowed: a multiple of the page size {page_size}")


def probe_elements(head_size: int) -> list[int]:
    """Returns the elements of an output that form the probe: evenly spread, all if there are at most `PROBE_SIZE`."""
    size = min(PROBE_SIZE, head_size)
    return [i * head_size // size for i in range(size)]
