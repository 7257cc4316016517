"""Attends with several query tokens of each request to its whole context. The context is read once for all of them."""

from sparse_kernels.multi_token_decode.api import multi_token_decode

__all__ = ["multi_token_decode"]
