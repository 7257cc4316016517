"""Measures the operations of `sparse_kernels` and their rivals on a GPU: `python -m bench.kernels --help`."""
