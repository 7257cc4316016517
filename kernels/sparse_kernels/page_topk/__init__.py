"""The k best pages of each row of scores."""

from sparse_kernels.page_topk.api import select_pages

__all__ = ["select_pages"]
