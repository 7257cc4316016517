"""How far a row of attention has to be read until its output is stable (ART)."""

from sparse_kernels.termination.api import count_visits, visited_pages
from sparse_kernels.termination.rule import PROBE_SIZE, StopRule, probe_elements

__all__ = ["PROBE_SIZE", "StopRule", "count_visits", "probe_elements", "visited_pages"]
