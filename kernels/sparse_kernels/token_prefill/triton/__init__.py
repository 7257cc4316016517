"""Prefills sparsely on a GPU: Triton for the attention, torch for the steps between.

The host reads no length: grids follow from upper bounds. Programs beyond the actual numbers return at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.token_prefill.lists import ListedAttention
from sparse_kernels.token_prefill.probes import draw_probes
from sparse_kernels.token_prefill.rule import TokenRule
from sparse_kernels.token_prefill.scratch import PrefillSizes, Scratch
from sparse_kernels.token_prefill.tokens import KeptTokens, choose_tokens
from sparse_kernels.token_prefill.triton.listed import attend_all, attend_among_kept, attend_listed
from sparse_kernels.token_prefill.triton.sums import attention_sums, launch_sums

__all__ = ["attention_sums", "launch_sums", "token_prefill"]


def token_prefill(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    rule: TokenRule,
    output: torch.Tensor,
    probes: torch.Tensor | None,
    attend: Callable[[ListedAttention], None] | None,
    scratch: Scratch | None,
) -> KeptTokens:
    """See `api.token_prefill`."""
    num_tokens, num_heads, head_size = batch.query.shape
    sizes = PrefillSizes(num_tokens, batch.num_requests, batch.max_seq_tokens, num_heads, head_size)
    if scratch is None:
        scratch = Scratch.make(sizes, rule, batch.query.dtype, output.dtype, batch.query.device)
    scratch.check(sizes, rule)
    if probes is None:
        probes = draw_probes(batch, rule)
    output.zero_()
    parts = []
    for first in range(0, batch.num_requests, len(scratch.sums)):
        last = min(first + len(scratch.sums), batch.num_requests)
        part = batch.requests(first, last)
        sums = launch_sums(part, cache, softmax, probes[first:last], scratch)
        kept = choose_tokens(sums, probes[first:last], part, rule)
        if rule.others == "attend":
            attend_all(part, cache, softmax, kept, rule, attend or attend_listed, output)
        else:
            attend_among_kept(part, cache, softmax, kept, attend or attend_listed, scratch, output)
        parts.append(kept)
    return KeptTokens.join(parts)
