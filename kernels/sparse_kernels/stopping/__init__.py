"""Finds how far a row of attention is read before its output is stable (ART)."""

from sparse_kernels.rules import PROBE_SIZE, StopRule, probe_elements
from sparse_kernels.stopping.api import count_reads, pages_until_stable

__all__ = ["PROBE_SIZE", "StopRule", "count_reads", "pages_until_stable", "probe_elements"]
