"""CUDA C++ kernels, compiled at run time by the NVRTC that comes with torch: no compiler needs to be installed."""

from sparse_kernels.cuda.launch import FORMATS, Kernel, kernel

__all__ = ["FORMATS", "Kernel", "kernel"]
