"""Base class of the policies that score pages by their statistics."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from sparse_kernels.formats import StatisticsFormat

from vllm_sparse_plugin.policies.base import Selection

if TYPE_CHECKING:
    import torch
    from sparse_kernels.batch import PageSelection
    from sparse_kernels.page_statistics import PageStatistics, StatisticsKind, StatisticsLayout

_MOST_LAYERS = _MOST_HEADS = 1024


class ScoredSelection(Selection):
    """Scores every page by its statistics and reads the best ones."""

    has_kernel = True
    statistics_kind: ClassVar[str | StatisticsKind]
    """The kind of page statistics, or its name in `KINDS`. It determines the score."""
    recent_pages: Annotated[int, Field(ge=0, le=64)] = 1
    """Newest complete pages that are always read, within the budget."""
    statistics: StatisticsFormat = "int8"
    """Storage format of the page statistics."""
    anchor_layers: Annotated[int | tuple[int, ...], "an integer from 1 to 64, or ascending layers"] = 1
    """Layers that choose pages, every nth or by index; the others read the pages of an anchor before."""
    anchor_heads: Annotated[tuple[tuple[int, ...], ...] | None, "null, or a list of KV heads for each layer"] = None
    """Heads of the anchor whose pages a layer's heads read, empty for an anchor; null: the same heads."""
    fingerprint: Annotated[str | None, "a text"] = None
    """The model that the anchors were found for; another one is refused."""

    @field_validator("anchor_layers", mode="plain")
    @classmethod
    def _one_number_or_ascending(cls, value: Any) -> int | tuple[int, ...]:
        if type(value) is int and 1 <= value <= 64:
            return value
        if not isinstance(value, (list, tuple)) or not 0 < len(value) <= _MOST_LAYERS:
            raise ValueError
        if any(type(layer) is not int or not 0 <= layer < _MOST_LAYERS for layer in value):
            raise ValueError
        if any(after <= before for before, after in pairwise(value)):
            raise ValueError
        return tuple(value)

    @field_validator("anchor_heads", mode="plain")
    @classmethod
    def _heads_of_layers(cls, value: Any) -> tuple[tuple[int, ...], ...] | None:
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or not 0 < len(value) <= _MOST_LAYERS:
            raise ValueError
        for heads in value:
            if not isinstance(heads, (list, tuple)) or len(heads) > _MOST_HEADS:
                raise ValueError
            if any(type(head) is not int or not 0 <= head < _MOST_HEADS for head in heads):
                raise ValueError
        return tuple(map(tuple, value))

    @model_validator(mode="after")
    def _heads_need_listed_anchors(self) -> Self:
        if self.anchor_heads is not None and isinstance(self.anchor_layers, int):
            raise PydanticCustomError(
                "sentence",
                "anchor_heads: got heads with anchor_layers {layers}, allowed: null, or with a list of layers",
                {"layers": self.anchor_layers},
            )
        return self

    @property
    def std_weight(self) -> float:
        """lambda, the weight of the spread in a page's score, for statistics with a spread."""
        return 0.0

    @property
    def refined_share(self) -> float:
        """The share of a long context's pages that leveled statistics score whole."""
        return 1.0

    @property
    def reserved_pages(self) -> int:
        return self.sink_pages + self.recent_pages

    def statistics_layout(self, head_size: int, cache_itemsize: int) -> StatisticsLayout:
        from sparse_kernels.page_statistics import KINDS, StatisticsLayout

        kind = self.statistics_kind
        kind = KINDS[kind] if isinstance(kind, str) else kind
        return StatisticsLayout(self.page_size, head_size, self.statistics, cache_itemsize, kind)

    def page_selection(self) -> PageSelection:
        from sparse_kernels.batch import PageSelection

        return PageSelection(self.budget_pages, self.sink_pages, self.recent_pages, self.std_weight, self.refined_share)

    def select(
        self,
        query: torch.Tensor,
        statistics: PageStatistics | None,
        block_table: torch.Tensor,
        num_pages: torch.Tensor,
    ) -> torch.Tensor:
        from sparse_kernels.page_score import score_pages
        from sparse_kernels.page_topk import select_pages

        assert statistics is not None
        scores = score_pages(query, statistics, block_table, num_pages, self.std_weight, self.refined_share)
        return select_pages(scores, num_pages, self.budget_pages, self.sink_pages, self.recent_pages)
