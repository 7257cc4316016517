"""Base classes of policies: settings, statistics, and the selection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from vllm_sparse_plugin.methods import Methods

if TYPE_CHECKING:
    import torch
    from sparse_kernels.batch import PageSelection
    from sparse_kernels.page_statistics import PageStatistics, StatisticsLayout


class Section(BaseModel):
    """A part of the configuration: frozen, no unknown keys, a docstring per field."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, validate_default=True
    )


class Policy(Section):
    """What a decode step reads."""

    departure: ClassVar[str] = ""
    """Differences of the selection from its paper, as a sentence; empty without differences."""
    policy: Any
    """Name of the selection policy."""

    @classmethod
    def name(cls) -> str:
        """Returns the name of the policy, as in `selection.policy`."""
        return str(cls.model_fields["policy"].default)

    def statistics_layout(self, head_size: int, cache_itemsize: int) -> StatisticsLayout | None:
        """Returns the layout of the policy's page statistics in the KV block; None if it needs none."""
        return None


class Selection(Policy):
    """A policy that selects pages, with the settings that all such policies share."""

    reads_every_page: ClassVar[bool] = False
    """Whether all pages may be read, independent of the budget."""
    has_kernel: ClassVar[bool] = False
    """Whether the decode kernel selects as `page_selection` describes. Otherwise `select` runs in torch on every
    device, and the decode kernel attends to the returned pages."""
    capturable: ClassVar[bool] = False
    """Whether a CUDA graph may hold `select`: it never waits for the device, and its shapes do not depend on data. Used
    only if `select` runs in torch on a GPU."""
    page_size: Literal[8, 16, 32] = 8
    """Tokens per page; vLLM's block size must be a multiple."""
    budget_tokens: Annotated[int, Field(ge=8, le=1 << 20)] = 512
    """Tokens of complete pages read per KV head; a multiple of `page_size`. Shorter contexts are dense."""
    sink_pages: Annotated[int, Field(ge=0, le=64)] = 1
    """First pages that are always read; they hold the attention sinks."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if cls.has_kernel and "select" in vars(cls) and "has_kernel" not in vars(cls):
            raise TypeError(f"{cls.__name__}.has_kernel: got none beside a `select`, allowed: True or False")

    @model_validator(mode="after")
    def _budget_holds_whole_pages(self) -> Self:
        least = self.least_budget_tokens
        if self.budget_tokens % self.page_size or self.budget_tokens < least:
            raise PydanticCustomError(
                "sentence",
                "budget_tokens: got {got}, allowed: a multiple of page_size ({page_size}), from {least} to 1048576",
                {"got": self.budget_tokens, "page_size": self.page_size, "least": least},
            )
        return self

    @property
    def reserved_pages(self) -> int:
        """Pages of the budget that are always read."""
        return self.sink_pages

    @property
    def least_budget_tokens(self) -> int:
        """Tokens of the smallest budget: the always-read pages and one more page."""
        return self.page_size * (self.reserved_pages + 1)

    @property
    def budget_pages(self) -> int:
        """Complete pages read per KV head in a decode step. Contexts of at most as many are read whole."""
        return self.budget_tokens // self.page_size

    def select(
        self,
        query: torch.Tensor,
        statistics: PageStatistics | None,
        block_table: torch.Tensor,
        num_pages: torch.Tensor,
    ) -> torch.Tensor:
        """Chooses the pages each token reads.

        Args:
            query: `[num_tokens, num_kv_heads, group_size, head_size]`.
            statistics: views into the cache, for policies with a `statistics_layout`.
            block_table: `[num_tokens, max_blocks]` int64, physical block ids.
            num_pages: `[num_tokens]` int64, complete pages of each token's context.

        Returns:
            `[num_tokens, num_kv_heads, k]` integer, logical page indices in any order. -1 stands for none, and
            so does a number that is not a complete page. k is the same in every step.
        """
        raise NotImplementedError

    def reading_order(
        self,
        query: torch.Tensor,
        statistics: PageStatistics | None,
        block_table: torch.Tensor,
        num_pages: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the selection of `select` for attention that may stop: sink pages first, then newest first.

        Arguments and result are those of `select`; -1 behind the last page.
        """
        import torch

        pages = self.select(query, statistics, block_table, num_pages)
        pages = pages.where(pages < num_pages[:, None, None], -1)
        newest = pages.sort(dim=-1, descending=True).values
        count = (newest >= 0).sum(dim=-1, keepdim=True)
        num_sinks = ((newest >= 0) & (newest < self.sink_pages)).sum(dim=-1, keepdim=True)
        slot = torch.arange(pages.shape[-1], device=pages.device)
        # The sink pages come after the others, the first sink page last.
        place = torch.where(slot < num_sinks, count - 1 - slot, slot - num_sinks)
        return newest.gather(-1, torch.where(slot < count, place, slot))

    def page_selection(self) -> PageSelection:
        """Returns the selection for the decode kernel; see `has_kernel`."""
        from sparse_kernels.batch import PageSelection

        return PageSelection(self.budget_pages, self.sink_pages)


POLICIES: Methods[Policy] = Methods("vllm_sparse_plugin.policies", Policy)
"""Every policy. Iteration yields those of this package."""


def reads_selection(selector: Selection | None) -> TypeGuard[Selection]:
    """Returns whether decoding tokens read only the pages that a policy chooses."""
    return selector is not None and not selector.reads_every_page
