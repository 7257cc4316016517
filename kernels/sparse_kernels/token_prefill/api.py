"""Entry point of the token-prefill operation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparse_kernels.batch import PrefillBatch, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.token_prefill import reference
from sparse_kernels.token_prefill.lists import ListedAttention
from sparse_kernels.token_prefill.rule import TokenRule
from sparse_kernels.token_prefill.scratch import Scratch
from sparse_kernels.token_prefill.tokens import KeptTokens


def token_prefill(
    batch: PrefillBatch,
    cache: KVCache,
    softmax: Softmax,
    rule: TokenRule,
    output: torch.Tensor,
    *,
    probes: torch.Tensor | None = None,
    attend: Callable[[ListedAttention], None] | None = None,
    scratch: Scratch | None = None,
) -> KeptTokens:
    """Attends to the important tokens of each context (ZipVL, arXiv 2410.08584).

    For each request, with n tokens of context of which the last m are the chunk's queries:

    1. *Probe rows*: the newest queries of the chunk, and random others (`draw_probes`).
    2. *Attention of the probe rows* (Eq. A): A' = softmax(Q_probe K^T x scale), causal, for each query head, with the
       softcap and the sink logits of the layer. a_j sums A' on token j over probe rows and query heads (Eq. 6), one
       set for the layer. The normalised a_j is divided by the number of probe rows that can see j (Eq. 8).
    3. *T* (Eq. 7 and 9): p is the smallest number of tokens whose largest a_j reach the share tau of their sum;
       with `rule.fixed_ratio`, this share of the tokens. T is the p tokens of highest normalised a_j (ties go to the
       first), and always the first `rule.sink_tokens` tokens and the chunk's last token, which predicts the next one.
       With tau or the ratio 1, or with n at most `rule.dense_tokens`, T is every token and the output is that of dense
       attention.
    4. *Attention*. If `rule.others` is `attend`, every query attends causally to the keys and values in T and to those
       of its newest `rule.local_tokens` tokens at least, itself included; see `TokenRule.window_start`. If it is `zero`
       (Alg. 1 of the paper), queries in T attend causally to the keys and values in T, and the outputs of all other
       queries are zero.

    **Chunks.** A chunk is a separate prefill whose context is everything before it. Only its own queries are available
    as probe rows. T is chosen again from all n tokens, including tokens that an earlier chunk dropped. Tokens from
    earlier chunks or from a cached prefix have only keys and values. A prompt in one chunk follows the paper. With
    several chunks, each has its own T, newest probe rows at its end, and a last token that attends. The cache drops
    nothing; the result says what a smaller cache would keep.

    A request's result depends only on that request. Everything is decided on the device: the host reads no length. Ties
    have a fixed order.

    Args:
        batch: the requests that prefill.
        cache: their keys and values, those of the chunk included.
        softmax: how logits become weights.
        rule: tau or the ratio, and the probe rows.
        output: where to write, `[num_tokens, num_query_heads, head_size]`, bfloat16 or float16 (on a CPU also
            float32), contiguous in its last dimension.
        probes: the result of `draw_probes` for this batch and rule, which layers of a step may share; None to draw.
        attend: runs step 4 on a GPU in place of this package's Triton kernel, for example FlashAttention 3.
        scratch: memory for the GPU's launches; None to allocate it.

    Returns:
        T of each request.

    Raises:
        ValueError: if the shapes disagree, the rule keeps no token, or the scratch is too small.
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
        rows: `[num_requests, num_rows]` int32, positions of the rows, each a query token of its request; -1 for
            none.

    Returns:
        `[num_requests, num_kv_heads, max_seq_tokens]` float32, summed over rows and the query heads of each KV head.
        Entries beyond a request's context are undefined.

    Raises:
        ValueError: if the shapes disagree.
    """
    batch.check(cache.num_kv_heads, cache.head_size)
    softmax.check(batch.query.shape[1])
    if not batch.query.is_cuda:
        return reference.column_sums(batch, cache, softmax, rows, by_head=True)
    from sparse_kernels.token_prefill import triton

    return triton.attention_sums(batch, cache, softmax, rows)
