"""Scores and chooses key blocks on a GPU, and orders queries for FlashAttention.

The host reads no length: grids follow from upper bounds. Programs beyond the actual numbers return at once.
"""

from sparse_kernels.block_prefill.triton.choose import virtual_sequences
from sparse_kernels.block_prefill.triton.prefill import prefill_blocks
from sparse_kernels.block_prefill.triton.rows import group_queries, ungroup
from sparse_kernels.block_prefill.triton.score import score_past
from sparse_kernels.block_prefill.triton.summaries import page_summaries

__all__ = ["group_queries", "page_summaries", "prefill_blocks", "score_past", "ungroup", "virtual_sequences"]
