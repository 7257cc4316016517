"""Scores each page for a query, from the page's statistics alone."""

from sparse_kernels.page_score.api import score_pages

__all__ = ["score_pages"]
