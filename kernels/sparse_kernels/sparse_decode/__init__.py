"""A whole decode step of sparse attention: scores pages, selects pages and attends to them."""

from sparse_kernels.sparse_decode.api import sparse_decode

__all__ = ["sparse_decode"]
