"""A whole decode step of sparse attention: scores pages, selects pages and attends to them."""

from sparse_kernels.sparse_decode.api import sparse_decode
from sparse_kernels.sparse_decode.scratch import StepSize, scratch_bytes

__all__ = ["StepSize", "scratch_bytes", "sparse_decode"]
