"""Makes a whole decode step of sparse attention: it scores, selects and attends."""

from sparse_kernels.sparse_decode.api import sparse_decode

__all__ = ["sparse_decode"]
