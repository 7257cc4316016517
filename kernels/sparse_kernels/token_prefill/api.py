"""Entry point of the token-prefill operation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.token_prefill import reference
from sparse_kernels.token_prefill.rule import TokenRule
from sparse_kernels.token_prefill.scratch import Scratch
from sparse_kernels.token_prefill.tokens import KeptAttention, KeptTokens


def token_prefill(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    rule: TokenRule,
    output: torch.Tensor,
    *,
    probes: torch.Tensor | None = None,
    attend: Callable[[KeptAttention], None] | None = None,
    scratch: Scratch | None = None,
) -> KeptTokens:
    """Attends to the tokens of each context that matter, with the queries of those tokens (ZipVL, arXiv 2410.08584).

    For each request, with n tokens of context of which the last m are the chunk's queries:

    1. *Probe rows*: the newest queries of the chunk, and others of it at random (`draw_probes`).
    2. *Attention of the probe rows* (Eq. A): A' = softmax(Q_probe K^T x scale), causal, for each query head, with the
       softcap and the sink logits of the layer. a_j adds up A' on token j over probe rows and query heads (Eq. 6),
       one set for the layer; the normalised a_j is divided by the number of probe rows that can see j (Eq. 8).
    3. *T* (Eq. 7 and 9): p is the smallest number of tokens whose largest a_j reach the share tau of the sum of all.
       T is the p tokens of highest normalised a_j, the first of equal ones, and always the chunk's last token, which
       predicts the next one. With tau = 1, and where n is at most `rule.dense_tokens`, T is every token, and the output
       is that of dense attention.
    4. *Attention* (Alg. 1): queries in T attend to the keys and values in T that are not behind them. The outputs of
       all other queries are zero.

    **What chunks mean.** A chunk is a prefill of its own whose context is everything before it: probe rows are queries
    of this chunk, since no others are at hand, and T is chosen anew from all n tokens, those before the chunk
    included, whether or not an earlier chunk kept them. Tokens before the chunk, from earlier chunks or from a
    prefix that was cached, have keys and values only. So a prompt in one chunk is the paper's algorithm; in several,
    each has its own T, the newest probe rows lie at the end of each chunk and not only at that of the prompt, and
    each chunk's last token attends. Nothing is dropped from the cache: what is returned is what a smaller cache
    would keep.

    A request's result follows from that request alone, not from its neighbours, and all is decided on the device: the
    host reads no length. Of equal sums no order is left to chance.

    Args:
        batch: the requests that prefill.
        cache: their keys and values, those of the chunk included.
        softmax: how logits become weights.
        rule: tau and the probe rows.
        output: where to write, `[num_tokens, num_query_heads, head_size]`, bfloat16 or float16 (on a CPU float32,
            too), contiguous in its last dimension.
        probes: what `draw_probes` returns for this batch and rule; drawn if left out. Layers of a step may share it.
        attend: runs step 4 on a GPU, in place of this package's Triton kernel. FlashAttention 3 can.
        scratch: memory for the GPU's launches; allocated if left out.

    Returns:
        T of each request.

    Raises:
        ValueError: if the shapes disagree, the rule keeps nothing, or there is too little scratch.
    """
    batch.check(cache.num_kv_heads, cache.head_size)
    cache.check()
    softmax.check(batch.query.shape[1])
    rule.check()
    if output.shape != batch.query.shape or output.device != batch.query.device:
        got = f"{list(output.shape)} on {output.device}"
        raise ValueError(f"output: got {got}, allowed: {list(batch.query.shape)} on {batch.query.device}")
    if probes is not None and tuple(probes.shape) != (batch.num_requests, rule.num_probes):
        raise ValueError(
            f"probes: got {list(probes.shape)}, allowed: {[batch.num_requests, rule.num_probes]}, by request and row"
        )
    if not batch.query.is_cuda:
        return reference.token_prefill(batch, cache, softmax, rule, output, probes)
    from sparse_kernels.token_prefill import triton

    return triton.token_prefill(batch, cache, softmax, rule, output, probes, attend, scratch)


def attention_sums(batch: PrefillBatch, cache: KVCache, softmax: Softmax, rows: torch.Tensor) -> torch.Tensor:
    """Adds up the attention of some rows of each request on each token (ZipVL, Eq. A and 6), for each KV head.

    Args:
        batch: the requests.
        cache: their keys.
        softmax: how logits become weights.
        rows: `[num_requests, num_rows]` int32, positions of the rows, each of a query token of its request; -1 for
            none.

    Returns:
        `[num_requests, num_kv_heads, max_seq_tokens]` float32, summed over rows and the query heads of each KV head;
        of each request as many as its context has.

    Raises:
        ValueError: if the shapes disagree.
    """
    batch.check(cache.num_kv_heads, cache.head_size)
    softmax.check(batch.query.shape[1])
    if not batch.query.is_cuda:
        return reference.column_sums(batch, cache, softmax, rows, by_head=True)
    from sparse_kernels.token_prefill import triton

    return triton.attention_sums(batch, cache, softmax, rows)
