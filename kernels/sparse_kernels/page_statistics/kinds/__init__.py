"""Kinds of page statistics: one file per kind, one row here."""

from sparse_kernels.page_statistics.kinds.base import StatisticsKind
from sparse_kernels.page_statistics.kinds.bounds import Bounds
from sparse_kernels.page_statistics.kinds.mean_and_spread import MeanAndSpread
from sparse_kernels.page_statistics.kinds.parts import LeveledQuarters, Quarters, Sketch
from sparse_kernels.page_statistics.kinds.representatives import Representatives

KINDS: dict[str, StatisticsKind] = {
    kind.name: kind for kind in (MeanAndSpread(), Bounds(), Representatives(), Quarters(), Sketch(), LeveledQuarters())
}
"""Every kind of page statistics by name. Formats, layouts, kernels and tests use this table."""

__all__ = ["KINDS", "StatisticsKind"]
