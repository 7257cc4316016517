"""The rule for the pages that a training token attends to."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_kernels.batch import PageSelection


@dataclass(frozen=True)
class PageMask:
    """The selection of a decode step as a mask for training (UNIQUE, Eq. 7-8)."""

    selection: PageSelection
    """The number of pages read, the pages always read, and lambda."""
    page_size: int
    """Tokens of a page."""
    temperature: float | None = None
    """T of the soft mask, in units of logits; None for the hard mask, which equals the selection."""
    dense_tokens: int = 0
    """Contexts of up to this many tokens are attended whole, as in serving."""

    @property
    def is_hard(self) -> bool:
        """Whether the mask has only the values 0 and 1."""
        return self.temperature is None

    @property
    def whole_tokens(self) -> int:
        """Tokens of the longest context that is attended whole."""
        return max(self.dense_tokens, (self.selection.k + 1) * self.page_size - 1)

    def reads_all(self, context_tokens: int) -> bool:
        """Returns whether contexts of up to `context_tokens` tokens are attended whole."""
        return context_tokens <= self.whole_tokens

    def check(self) -> None:
        """Raises ValueError if a value is out of range, or if every page of the budget is always read."""
        self.selection.check()
        always = self.selection.sink_pages + self.selection.recent_pages
        if self.selection.k <= always:
            raise ValueError(f"k: got {self.selection.k}, allowed: above the {always} pages that are always read")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size: got {self.page_size}, allowed: a power of two")
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature: got {self.temperature}, allowed: a positive number")
        if self.dense_tokens < 0:
            raise ValueError(f"dense_tokens: got {self.dense_tokens}, allowed: at least 0")
