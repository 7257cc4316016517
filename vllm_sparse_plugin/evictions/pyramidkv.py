"""PyramidKV (arXiv 2406.02069) is SnapKV with budgets that fall from layer to layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from vllm_sparse_plugin.evictions.base import COMPACTIONS
from vllm_sparse_plugin.evictions.retention import Pyramid, Retention
from vllm_sparse_plugin.evictions.snapkv import SnapKVCompaction


@COMPACTIONS.built_in
class PyramidKVCompaction(SnapKVCompaction):
    """PyramidKV (arXiv 2406.02069): SnapKV with budgets that fall from layer to layer and are `budget_tokens` on
    average, since the first layers attend to more places than the last ones."""

    method: Literal["pyramidkv"] = "pyramidkv"  # type: ignore[assignment]
    """Name of the method."""
    window_tokens: Annotated[int, Field(ge=1, le=512)] = 128
    """Newest tokens; they vote and are kept."""
    beta: Annotated[float, Field(ge=1.0, le=1000.0)] = 20.0
    """The last layer keeps the average budget divided by this, the first layers more; 1: equal budgets."""
    layer_classes: Annotated[int, Field(ge=1, le=16)] = 4
    """Largest number of different budgets; consecutive layers share a budget and a block table."""

    def retention(self) -> Retention:
        return replace(super().retention(), pyramid=Pyramid(self.beta, self.layer_classes))
