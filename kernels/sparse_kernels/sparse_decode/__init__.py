"""A whole decode step of sparse attention: score, select and attend."""

from sparse_kernels.sparse_decode.api import sparse_decode

__all__ = ["sparse_decode"]
