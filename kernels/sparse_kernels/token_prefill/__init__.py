"""Attention of a prompt to its important tokens (ZipVL)."""

from sparse_kernels.token_prefill.api import attention_sums, token_prefill
from sparse_kernels.token_prefill.lists import ListedAttention
from sparse_kernels.token_prefill.probes import draw_probes
from sparse_kernels.token_prefill.rule import TokenRule
from sparse_kernels.token_prefill.scratch import PrefillSizes, Scratch
from sparse_kernels.token_prefill.tokens import KeptTokens, attended_pairs, rows_that_see

__all__ = [
    "KeptTokens",
    "ListedAttention",
    "PrefillSizes",
    "Scratch",
    "TokenRule",
    "attended_pairs",
    "attention_sums",
    "draw_probes",
    "rows_that_see",
    "token_prefill",
]
