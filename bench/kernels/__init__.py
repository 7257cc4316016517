"""Measures the operations of `sparse_kernels` on a GPU, each beside its rivals: `python -m bench.kernels --help`."""
