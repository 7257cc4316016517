"""StreamingLLM (arXiv 2309.17453) reads the first and the newest tokens, independent of the query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vllm_sparse_plugin.policies.base import POLICIES, Selection

if TYPE_CHECKING:
    import torch
    from sparse_kernels.page_statistics import PageStatistics


@POLICIES.built_in
class StreamingLLMSelection(Selection):
    """StreamingLLM: the sink pages, and the newest pages for the rest of the budget.

    The paper keeps 4 initial tokens and a window of the newest tokens. Here both are whole pages. One sink page holds
    the paper's 4 tokens. The window is the rest of `budget_tokens` plus the incomplete page; it grows by up to a page
    before it moves. Keys keep the positions of the text. The paper counts positions within the kept tokens, which
    matters beyond the model's training length.
    """

    has_kernel = True
    departure = "The sinks and the window are whole pages, and keys keep the positions of the text."
    policy: Literal["streaming_llm"] = "streaming_llm"
    """Name of the selection policy."""

    def select(
        self,
        query: torch.Tensor,
        statistics: PageStatistics | None,
        block_table: torch.Tensor,
        num_pages: torch.Tensor,
    ) -> torch.Tensor:
        import torch

        offsets = torch.arange(self.budget_pages, device=query.device)
        newest = num_pages[:, None] - self.budget_pages + offsets
        pages = torch.where(offsets < self.sink_pages, offsets, newest)
        # A context within the budget is read whole, with page i at slot i.
        pages = torch.where(num_pages[:, None] > self.budget_pages, pages, offsets)
        pages = torch.where(pages < num_pages[:, None], pages, -1)
        return pages[:, None, :].expand(-1, query.shape[1], -1)
