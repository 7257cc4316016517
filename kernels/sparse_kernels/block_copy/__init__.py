"""Copies blocks of a cache."""

from sparse_kernels.block_copy.api import copy_blocks

__all__ = ["copy_blocks"]
