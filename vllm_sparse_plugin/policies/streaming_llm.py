"""StreamingLLM (arXiv 2309.17453): the first pages and the newest ones, whatever the query."""

from __future__ import annotations

from typing import Literal

import torch
from sparse_kernels.page_statistics import PageStatistics

from vllm_sparse_plugin.policies.base import Selection


class StreamingLLMSelection(Selection):
    """StreamingLLM: the sink pages, and the newest pages for the rest of the budget."""

    policy: Literal["streaming_llm"] = "streaming_llm"
    """Name of the selection policy."""

    def select(
        self,
        query: torch.Tensor,
        statistics: PageStatistics | None,
        block_table: torch.Tensor,
        num_pages: torch.Tensor,
    ) -> torch.Tensor:
        offsets = torch.arange(self.budget_pages, device=query.device)
        newest = num_pages[:, None] - self.budget_pages + offsets
        pages = torch.where(offsets < self.sink_pages, offsets, newest)
        # A context within the budget is read whole: page i at slot i.
        pages = torch.where(num_pages[:, None] > self.budget_pages, pages, offsets)
        pages = torch.where(pages < num_pages[:, None], pages, -1)
        return pages[:, None, :].expand(-1, query.shape[1], -1)
