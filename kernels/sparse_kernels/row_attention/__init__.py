"""Attends with one query token to its whole context and to the pages read, and returns the weight of each page."""

from sparse_kernels.row_attention.api import attend_row
from sparse_kernels.row_attention.outputs import RowAttention
from sparse_kernels.row_attention.reference import attend, masked_logits

__all__ = ["RowAttention", "attend", "attend_row", "masked_logits"]
