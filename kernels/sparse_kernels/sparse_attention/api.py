"""Entry point of the sparse-attention operation."""

from __future__ import annotations

import torch

from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_attention import reference


def attend_pages(
    query: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Softmax attention over the selected pages and the incomplete last page (UNIQUE, Eq. 5).

    Exact over those tokens: selecting every complete page gives dense attention. Memory outside the context,
    whatever it holds, has no influence.

    Args:
        query: `[num_tokens, num_kv_heads, group_size, head_size]`, float16, bfloat16 or float32.
        keys: the cached keys.
        values: the cached values, with the keys' page size.
        block_table: `[num_tokens, max_blocks]` int64, physical block ids of each token's request.
        context_lens: `[num_tokens]` int64, tokens each query token may attend, itself included; at least 1.
        pages: `[num_tokens, num_kv_heads, k]` int64, complete pages to attend, -1 for none.
        scale: factor of the logits, usually `head_size ** -0.5`.
        sinks: learned sink logits `[num_query_heads]`: they join the softmax's denominator and nothing else.
        softcap: logits become `softcap * tanh(logits / softcap)`; 0 for none.

    Returns:
        `[num_tokens, num_query_heads, head_size]` in the query's dtype; all arithmetic in float32.

    Raises:
        ValueError: if the shapes disagree.
    """
    num_tokens, num_kv_heads, group_size, head_size = query.shape
    if keys.page_size != values.page_size:
        raise ValueError(f"values: got pages of {values.page_size} tokens, allowed: the keys' {keys.page_size}")
    if (num_kv_heads, head_size) != (keys.num_kv_heads, keys.head_size):
        raise ValueError(
            f"query: got {num_kv_heads} KV heads of size {head_size}, allowed: the keys' "
            f"{keys.num_kv_heads} of size {keys.head_size}"
        )
    if pages.shape[:2] != (num_tokens, num_kv_heads):
        raise ValueError(f"pages: got {tuple(pages.shape)}, allowed: [{num_tokens}, {num_kv_heads}, k]")
    if sinks is not None and sinks.numel() != num_kv_heads * group_size:
        raise ValueError(f"sinks: got {sinks.numel()} logits, allowed: {num_kv_heads * group_size}")
    if num_tokens == 0:
        return query.new_empty((0, num_kv_heads * group_size, values.head_size))
    implementation = reference.attend_pages
    if query.device.type == "cpu" and query.dtype == keys.view.dtype == values.view.dtype == torch.bfloat16:
        from sparse_kernels.sparse_attention import cpu

        implementation = cpu.attend_pages
    elif query.is_cuda:
        from sparse_kernels.sparse_attention import cuda

        implementation = cuda.attend_pages
    return implementation(query, keys, values, block_table, context_lens, pages, scale, sinks, softcap)
