"""CUDA C++ kernels, compiled at run time by the NVRTC that comes with torch: no compiler needs to be installed."""
