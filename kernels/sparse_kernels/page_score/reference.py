"""Scores pages in torch; this is the specification, and it runs where there is no compiled path.

A page's score for a query head follows from its record as the kind of statistics says (`page_statistics.kinds`), and
the score of the page is the largest over the query heads of the KV head: S_p = max_g s_p(q_g) (UNIQUE, Eq. 6).
"""

from __future__ import annotations

import torch

from sparse_kernels.page_score.levels import refined_pages
from sparse_kernels.page_statistics import PageStatistics


def score_pages(
    query: torch.Tensor,
    statistics: PageStatistics,
    block_table: torch.Tensor,
    num_pages: torch.Tensor,
    std_weight: float,
    refined: float = 1.0,
) -> torch.Tensor:
    """See `api.score_pages`."""
    num_tokens, num_kv_heads = query.shape[:2]
    kind, pages_per_block = statistics.kind, statistics.pages_per_block
    lengths = num_pages.tolist()
    scores = query.new_full((num_tokens, num_kv_heads, max(lengths)), -torch.inf, dtype=torch.bfloat16)
    query = query.float()
    norm = std_weight * query.norm(dim=-1, keepdim=True)
    # Features are [num_tokens, num_kv_heads, vectors, group_size, head_size].
    features = kind.features(query, std_weight).transpose(2, 3)
    # Rows go one at a time: the arithmetic of a row must not depend on its neighbours' lengths.
    for token, length in enumerate(lengths):
        blocks = block_table[token, : -(-length // pages_per_block)]
        vectors, scales, spread = statistics.records(blocks)
        # Products are [num_kv_heads, vectors, group_size, pages].
        products = features[token] @ vectors.permute(0, 2, 3, 1)
        if scales is not None:
            products *= scales.transpose(1, 2).unsqueeze(2)
        raw = kind.combine(products.movedim(1, -1))
        if spread is not None:
            raw = torch.addcmul(raw, norm[token], spread.unsqueeze(1))
        scores[token, :, :length] = raw.amax(dim=1)[:, :length]
        if kind.is_leveled:
            first = kind.first_score(products[:, 0]).amax(dim=1)[:, :length].bfloat16()
            unrefined = ~refined_pages(first, pages_per_block, refined)
            scores[token, :, :length].masked_fill_(unrefined, -torch.inf)
    return scores
