"""Selects the k best pages of each row of scores."""

from sparse_kernels.page_topk.api import best_first, select_pages

__all__ = ["best_first", "select_pages"]
