"""Entry points of attention under a page mask."""

from __future__ import annotations

import torch

from sparse_kernels.masked_attention import reference
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

    Each token and KV head has a mask of its own over the complete pages before it (`reference.log_mask`); the token's
    incomplete page, the pages that are always read, and contexts that fit the budget have m = 1, exactly as they are
    served. Gradients reach queries and keys through the logits, queries, vectors and deviations through the scores, and
    the values. On a GPU nothing of the size of a matrix of logits or scores is kept.

    Args:
        query: `[num_tokens, num_query_heads, head_size]`.
        key: `[num_tokens, num_kv_heads, head_size]`, of the dtype of the query.
        value: as `key`.
        records: `page_records` of the keys.
        packing: the sequences of the tokens.
        mask: which pages, and how softly.
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
    """Computes the attention of the newest tokens of one sequence under a page mask, as `masked_attention` has it.

    It runs in torch on every device, and computes whole matrices of their logits.

    Args:
        query: `[num_newest, num_query_heads, head_size]`, of the last tokens.
        key: `[num_tokens, num_kv_heads, head_size]`, of all.
        value: as `key`.
        records: of the sequence's complete pages.
        mask: which pages, and how softly.
        scale: s, the factor of logits.

    Returns:
        Like `query`.

    Raises:
        ValueError: if the mask makes no sense.
    """
    mask.check()
    return reference.newest_attention(query, key, value, records, mask, scale)
