"""Dense attention reads everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vllm_sparse_plugin.policies.base import POLICIES, Policy, Selection

if TYPE_CHECKING:
    import torch
    from sparse_kernels.page_statistics import PageStatistics


@POLICIES.built_in
class DensePolicy(Policy):
    """Reads everything with vLLM's kernels: the baseline of a sparse policy with otherwise equal settings."""

    policy: Literal["dense"] = "dense"
    """Name of the selection policy."""


class EveryPage(Selection):
    """Dense attention with this plugin's kernels, for attention that may stop: every page, whatever the budget."""

    reads_every_page = True
    has_kernel = True
    policy: Literal["dense"] = "dense"
    page_size: Literal[8, 16, 32] = 16
    budget_tokens: int = 1 << 20

    @property
    def budget_pages(self) -> int:
        return 0

    def select(
        self,
        query: torch.Tensor,
        statistics: PageStatistics | None,
        block_table: torch.Tensor,
        num_pages: torch.Tensor,
    ) -> torch.Tensor:
        import torch

        page = torch.arange(int(num_pages.max()) if len(num_pages) else 0, device=num_pages.device)
        return torch.where(page < num_pages[:, None], page, -1)[:, None].expand(-1, query.shape[1], -1)
