"""Entry point of the sparse-decode operation."""

from __future__ import annotations

import torch

from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, Softmax, check_pages
from sparse_kernels.cache import KVCache
from sparse_kernels.rules import GroupRouting, StopRule
from sparse_kernels.sparse_decode import reference


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

    It is `score_pages`, `select_pages` and `attend_pages` one after the other, decided on the device alone: no length
    is read by the host, and launches captured in a CUDA graph serve every later batch of their size. The bits
    of a token's output depend on that token alone.

    With a `rule`, attention may stop early (ART, arXiv 2606.00024; see `stopping.pages_until_stable`): pages that are
    always selected are read first, then the others best score first, or newest first without statistics. Contexts
    that are attended whole because they are short or their request says so are read to the end.

    Pages may come from outside and go outside: `batch.pages` are attended without scoring or selection, and the chosen
    pages are written to `output.pages`. What one layer or step chose can so serve another.

    Args:
        batch: the requests that decode.
        cache: their keys, values and statistics; without statistics the `sink_pages` first and the newest other pages
            are selected.
        softmax: how logits become weights.
        selection: which pages are read.
        routing: which KV groups are skipped and have a zero output, unless their context is attended whole (SinkRouter,
            Eq. 14). Nothing of a skipped group is read but token 0's key. None for no such groups.
        rule: when attention stops; None if it reads everything. Blocks of fewer than 512 tokens (256 where heads are
            larger than 128 or groups than 8) may change the last bit of an output.
        output: where to write; a new tensor of the query's dtype (bfloat16 for a float8 query) if left out.

    Returns:
        The output's heads, `[num_tokens, num_query_heads, head_size]`.

    Raises:
        ValueError: if the shapes disagree; on CUDA, where there is a rule, also if `k` or the shared memory of a block
            is beyond its limit, or if the GPU has no clusters.
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
    implementation(batch, cache, softmax, selection, routing, rule, output)
    return output.heads
