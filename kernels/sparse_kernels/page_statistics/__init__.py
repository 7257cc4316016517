"""Statistics of the keys of each page, stored in the same cache block."""

from sparse_kernels.formats import STATISTICS_FORMATS, StatisticsFormat
from sparse_kernels.page_statistics.api import update_page_statistics, write_cache
from sparse_kernels.page_statistics.kinds import KINDS, StatisticsKind
from sparse_kernels.page_statistics.kinds.base import RecordFormat
from sparse_kernels.page_statistics.layout import FEW_SLOTS, PageStatistics, StatisticsLayout

__all__ = [
    "FEW_SLOTS",
    "KINDS",
    "STATISTICS_FORMATS",
    "PageStatistics",
    "RecordFormat",
    "StatisticsFormat",
    "StatisticsKind",
    "StatisticsLayout",
    "update_page_statistics",
    "write_cache",
]
