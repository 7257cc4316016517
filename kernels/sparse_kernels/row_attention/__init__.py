"""Attends with one query token to its whole context and to the pages that it reads, and says what each page weighs."""

from sparse_kernels.row_attention.api import attend_row
from sparse_kernels.row_attention.outputs import RowAttention
from sparse_kernels.row_attention.reference import attend, masked_logits

__all__ = ["RowAttention", "attend", "attend_row", "masked_logits"]
