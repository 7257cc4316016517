"""CUDA C++ kernels. The NVRTC of torch compiles them at run time, so users need no compiler."""
