"""A decode step of sparse attention on a CPU."""

from __future__ import annotations

from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.rules import GroupRouting, StopRule
from sparse_kernels.split_attention.cpu import decode_tokens


def sparse_decode(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    selection: PageSelection,
    routing: GroupRouting | None,
    rule: StopRule | None,
    output: DecodeOutput,
) -> None:
    """See `api.sparse_decode`."""
    lengths, requested = batch.num_pages(cache.page_size).tolist(), batch.token_budgets()
    most = [selection.k] * batch.num_tokens if requested is None else requested.clamp(max=selection.k).tolist()
    budgets = [budget if length > budget else None for length, budget in zip(lengths, most, strict=True)]
    decode_tokens(batch, cache, softmax, selection, budgets, routing, rule, output)
