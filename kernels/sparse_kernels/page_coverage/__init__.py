"""Counts the pages that a decode step must read to reach a share of its attention weight, from the page statistics."""

from sparse_kernels.page_coverage.api import count_pages, count_rows, row_page_logits
from sparse_kernels.page_coverage.estimate import page_logits
from sparse_kernels.page_coverage.rule import Limits

__all__ = ["Limits", "count_pages", "count_rows", "page_logits", "row_page_logits"]
