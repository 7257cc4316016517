"""Exact attention to selected pages of a paged cache."""

from sparse_kernels.sparse_attention.api import attend_pages

__all__ = ["attend_pages"]
