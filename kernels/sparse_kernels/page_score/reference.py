"""Page scores in torch: the specification, and what runs on CPU.

For a query head q and page p with mean key mu_p and standard deviation sigma_p (UNIQUE, Eq. 3 and 6):

    s_p(q) = q . mu_p + lambda ||q||_2 sigma_p            S_p = max over the query heads of the KV head
"""

from __future__ import annotations

import torch

from sparse_kernels.page_statistics import PageStatistics


def _rows_of(table: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """`[num_kv_heads, len(blocks) * pages_per_block, ...]` float32, head-major."""
    # 8-bit floats cannot be gathered, their bits can.
    bits = torch.uint8 if table.dtype == torch.float8_e4m3fn else table.dtype
    picked = table.view(bits).transpose(0, 1).index_select(1, blocks)
    return picked.view(table.dtype).flatten(1, 2).float()


def score_pages(
    query: torch.Tensor,
    statistics: PageStatistics,
    block_table: torch.Tensor,
    num_pages: torch.Tensor,
    std_weight: float,
) -> torch.Tensor:
    """See `api.score_pages`."""
    num_tokens, num_kv_heads = query.shape[:2]
    pages_per_block = statistics.mean.shape[2]
    lengths = num_pages.tolist()
    scores = query.new_full((num_tokens, num_kv_heads, max(lengths)), -torch.inf, dtype=torch.bfloat16)
    query = query.float()
    spread = std_weight * query.norm(dim=-1, keepdim=True)
    # One row at a time: the arithmetic of a row must not depend on its neighbours' lengths.
    for token, length in enumerate(lengths):
        blocks = block_table[token, : -(-length // pages_per_block)]
        raw = torch.bmm(query[token], _rows_of(statistics.mean, blocks).transpose(1, 2))
        if statistics.scale is not None:
            raw *= _rows_of(statistics.scale, blocks).unsqueeze(1)
        raw = torch.addcmul(raw, spread[token], _rows_of(statistics.std, blocks).unsqueeze(1))
        scores[token, :, :length] = raw.amax(dim=1)[:, :length]
    return scores
