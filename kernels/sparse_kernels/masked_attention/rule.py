"""Says which pages a token of training attends to, and how softly."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_kernels.batch import PageSelection


@dataclass(frozen=True)
class PageMask:
    """The selection of a decode step, as a mask that a model can be trained with (UNIQUE, Eq. 7-8)."""

    selection: PageSelection
    """How many pages are read, which of them always, and lambda."""
    page_size: int
    """Tokens of a page."""
    temperature: float | None = None
    """T of the soft mask, in units of logits; None for the hard mask, which is the selection itself."""
    dense_tokens: int = 0
    """Contexts of up to this many tokens are attended whole, as they are served."""

    @property
    def is_hard(self) -> bool:
        """Whether a page is read or not, with nothing between."""
        return self.temperature is None

    @property
    def whole_tokens(self) -> int:
        """Tokens of the longest context that is attended whole."""
        return max(self.dense_tokens, (self.selection.k + 1) * self.page_size - 1)

    def reads_all(self, context_tokens: int) -> bool:
        """Returns whether contexts of up to so many tokens are attended whole."""
        return context_tokens <= self.whole_tokens

    def check(self) -> None:
        """Raises ValueError unless the numbers make sense, and a page is left that scores decide about."""
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
