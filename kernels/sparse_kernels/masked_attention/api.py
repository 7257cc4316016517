"""Entry points of attention under a page mask."""

from __future__ import annotations

import torch

from sparse_kernels.masked_attention import gathered, reference
from sparse_kernels.masked_attention.packing import Packing
from sparse_kernels.masked_attention.records import PageRecords
from sparse_kernels.masked_attention.rule import PageMask


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    records: PageRecords,
    packing: Packing,
    mask: PageMask,
    scale: float,
) -> torch.Tensor:
    """Computes causal attention of whole sequences as if every token were decoded, differentiably.

        o_i = sum over j <= i of  softmax_j( s q_i . k_j + log m_(i, page of j) ) v_j

    Each token and KV head has its own mask over the complete pages before the token (`reference.log_mask`). As in
    serving, m = 1 for the token's incomplete page, for pages that are always read, and for contexts that fit the
    budget. Gradients reach queries and keys through the logits; queries, vectors and deviations through the scores; and
    the values. On a GPU, no matrix of logits or scores is kept.

    Args:
        query: `[num_tokens, num_query_heads, head_size]`.
        key: `[num_tokens, num_kv_heads, head_size]`, of the dtype of the query.
        value: as `key`.
        records: `page_records` of the keys.
        packing: the lengths of the sequences.
        mask: the pages, and the temperature.
        scale: s, the factor of logits.

    Returns:
        Like `query`.

    Raises:
        ValueError: if shapes disagree.
    """
    mask.check()
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads = key.shape[1]
    if key.shape != (num_tokens, num_kv_heads, head_size) or value.shape != key.shape or num_heads % num_kv_heads:
        raise ValueError(
            f"key and value: got {list(key.shape)} and {list(value.shape)}, allowed: both "
            f"[{num_tokens}, a divisor of {num_heads}, {head_size}]"
        )
    if packing.num_tokens != num_tokens or min(packing.lengths, default=0) < 1:
        raise ValueError(f"packing: got {packing.num_tokens} tokens, allowed: {num_tokens}, one or more a sequence")
    if records.vectors.shape[:2] != (packing.num_pages(mask.page_size), num_kv_heads):
        raise ValueError(
            f"records: got {list(records.vectors.shape[:2])} pages and heads, allowed: "
            f"{[packing.num_pages(mask.page_size), num_kv_heads]}"
        )
    if query.is_cuda:
        from sparse_kernels.masked_attention import triton

        return triton.masked_attention(query, key, value, records, packing, mask, scale)
    return reference.masked_attention(query, key, value, records, packing, mask, scale)


def newest_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    records: PageRecords,
    mask: PageMask,
    scale: float,
) -> torch.Tensor:
    """Computes the attention of the newest tokens of one sequence under a page mask, like `masked_attention`.

    It runs in torch on every device. Under the soft mask it computes whole matrices of logits. Under the hard mask it
    computes only the logits of the pages read, if these take less memory.

    Args:
        query: `[num_newest, num_query_heads, head_size]`, of the last tokens.
        key: `[num_tokens, num_kv_heads, head_size]`, of all.
        value: as `key`.
        records: of the sequence's complete pages.
        mask: the pages, and the temperature.
        scale: s, the factor of logits.

    Returns:
        Like `query`.

    Raises:
        ValueError: if the mask is invalid.
    """
    mask.check()
    read_tokens, group = (mask.selection.k + 1) * mask.page_size, query.shape[1] // key.shape[1]
    # Gathered keys and values must not take more memory than all logits do.
    gathers = mask.is_hard and 2 * query.shape[2] * read_tokens <= group * len(key)
    attend = gathered.newest_attention if gathers else reference.newest_attention
    return attend(query, key, value, records, mask, scale)


def dense_shares(query: torch.Tensor, key: torch.Tensor, page_size: int, scale: float) -> torch.Tensor:
    """Computes the share of dense attention on each complete page, for the newest tokens of one sequence.

    It runs in torch on every device, computes whole matrices of the tokens' logits, and has no gradient.

    Args:
        query: `[num_newest, num_query_heads, head_size]`, of the last tokens.
        key: `[num_tokens, num_kv_heads, head_size]`, of all.
        page_size: tokens of a page.
        scale: the factor of logits.

    Returns:
        `[num_kv_heads, num_newest, num_pages]`, the mean over the group's query heads: float64 for float64 queries,
        float32 for others.
    """
    return reference.dense_shares(query, key, page_size, scale)


def selection_loss(
    query: torch.Tensor, num_tokens: int, records: PageRecords, shares: torch.Tensor, mask: PageMask, scale: float
) -> torch.Tensor:
    """Computes the divergence of the page scores from dense attention, for the newest tokens of one sequence.

        sum over tokens and KV heads of  sum_p a_p ( log(a_p / sum_p a_p) - log softmax_p( s S_p ) )

    a_p is the share of page p. p runs over the pages that scores decide about; pages that are always read have no term.
    Each token is weighted by its attention on these pages. Under a hard mask, a page that is not read gets no gradient;
    this loss gives it one. Gradients reach queries, vectors and deviations.

    Args:
        query: `[num_newest, num_query_heads, head_size]`, of the last tokens.
        num_tokens: tokens of the sequence.
        records: of the sequence's complete pages.
        shares: `dense_shares` of the same tokens and pages.
        mask: which pages are always read; its temperature does not matter.
        scale: s, the factor of logits.

    Returns:
        A sum in nats, float64 for float64 queries, float32 for others.

    Raises:
        ValueError: if the mask is invalid.
    """
    mask.check()
    return reference.selection_loss(query, num_tokens, records, shares, mask, scale)
