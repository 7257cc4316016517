"""Names of formats. They need no torch, so a configuration can be checked before torch is imported."""

from typing import Literal, get_args

StatisticsFormat = Literal["int8", "fp8", "bf16"]
"""Formats that any vector of page statistics can be stored in."""
STATISTICS_FORMATS: tuple[StatisticsFormat, ...] = get_args(StatisticsFormat)
