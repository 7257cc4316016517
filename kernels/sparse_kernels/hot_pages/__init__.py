"""Copies in device memory of the pages of a cache in host memory."""

from sparse_kernels.hot_pages.api import begin_step
from sparse_kernels.hot_pages.pages import WAYS, HotPages, HotPool

__all__ = ["WAYS", "HotPages", "HotPool", "begin_step"]
