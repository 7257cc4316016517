"""Attention under a page mask on a GPU: the soft mask (`soft`) and the hard mask (`listed`), forward and backward."""

from sparse_kernels.masked_attention.triton.attention import masked_attention

__all__ = ["masked_attention"]
