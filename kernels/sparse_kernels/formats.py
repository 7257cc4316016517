"""Names of formats, for those who ask for one before they need torch."""

from typing import Literal, get_args

StatisticsFormat = Literal["int8", "fp8", "bf16"]
"""Formats that any vector of page statistics can be stored in."""
STATISTICS_FORMATS: tuple[StatisticsFormat, ...] = get_args(StatisticsFormat)
