"""Entry point of the sparse-decode operation."""

from __future__ import annotations

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, Softmax, check_pages
from sparse_kernels.cache import KVCache
from sparse_kernels.rules import GroupRouting, StopRule
from sparse_kernels.sparse_decode import reference
from sparse_kernels.split_attention.api import compiles_for_cpu


def sparse_decode(
    batch: DecodeBatch,
    cache: KVCache,
    softmax: Softmax,
    selection: PageSelection,
    *,
    routing: GroupRouting | None = None,
    rule: StopRule | None = None,
    output: DecodeOutput | None = None,
) -> torch.Tensor:
    """Computes attention of decoding tokens over the best pages of their context (UNIQUE, Eq. 3, 5 and 6).

    It equals `score_pages`, `select_pages` and `attend_pages` in sequence. The host reads no lengths, so launches in a
    CUDA graph serve every later batch of the same size. The bits of a token's output depend on that token alone.

    With a `rule`, attention may stop early (ART, arXiv 2606.00024; see `stopping.pages_until_stable`). Always-read
    pages come first in the order, then the other pages by descending score; without statistics the newest first.
    Contexts that attend densely are read to the end.

    `batch.pages` replaces scoring and selection. `output.pages` receives the selected pages, for use by other layers or
    steps.

    Args:
        batch: the decoding requests.
        cache: keys, values and statistics. Without statistics, the first `sink_pages` and the newest pages are
            selected.
        softmax: how logits become weights.
        selection: how many pages are read, and which pages always.
        routing: which KV groups are skipped (SinkRouter, Eq. 14). A skipped group has a zero output; only the key of
            token 0 is read. Contexts that attend densely are not routed. None skips no group.
        rule: the stop rule; None for no early stop. Test intervals of fewer than 512 tokens may change the last bit of
            an output (256 with heads above 128 elements or groups above 8 heads).
        output: where to write; a new tensor of the query's dtype (bfloat16 for a float8 query) by default.

    Returns:
        The output's heads, `[num_tokens, num_query_heads, head_size]`.

    Raises:
        ValueError: if shapes disagree. On CUDA with a rule also if `k` or the shared memory of a thread block is above
            its limit, or if the GPU has no clusters.
    """
    batch.check(cache.num_kv_heads, cache.head_size)
    cache.check()
    selection.check()
    softmax.check(batch.query.shape[1])
    if routing is not None:
        routing.check(cache.num_kv_heads)
    if rule is not None:
        rule.check(cache.page_size)
    output = DecodeOutput.like(batch.query) if output is None else output
    output.check(batch, cache.num_kv_heads)
    lists = batch.num_tokens, cache.num_kv_heads, selection.k
    for name, pages in (("pages", batch.pages), ("output.pages", output.pages)):
        if pages is not None:
            check_pages(name, pages, lists, batch.query.device)
    if batch.pages is not None and output.pages is not None:
        raise ValueError("output.pages: got room for pages, allowed: None where the batch has pages")
    if batch.num_tokens == 0:
        return output.heads
    implementation = reference.sparse_decode
    if batch.query.is_cuda:
        from sparse_kernels.sparse_decode import cuda

        implementation = cuda.sparse_decode
    elif compiles_for_cpu(batch, cache, softmax, routing):
        from sparse_kernels.sparse_decode import cpu

        implementation = cpu.sparse_decode
    implementation(batch, cache, softmax, selection, routing, rule, output)
    return output.heads
