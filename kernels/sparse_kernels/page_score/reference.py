"""Scores pages in torch; this is the specification, and it runs where there is no compiled path.

A page's score for a query head follows from its record as the kind of statistics says (`page_statistics.kinds`), and
the score of the page is the largest over the query heads of the KV head: S_p = max_g s_p(q_g) (UNIQUE, Eq. 6).
"""

from __future__ import annotations

import torch

from sparse_kernels.page_statistics import PageStatistics


def _rows_of(table: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Returns the rows of some blocks head-major: `[num_kv_heads, len(blocks) * pages_per_block, ...]`."""
    # torch cannot gather 8-bit floats, but it can gather their bits.
    bits = torch.uint8 if table.dtype == torch.float8_e4m3fn else table.dtype
    picked = table.view(bits).transpose(0, 1).index_select(1, blocks)
    return picked.view(table.dtype).flatten(1, 2)


def score_pages(
    query: torch.Tensor,
    statistics: PageStatistics,
    block_table: torch.Tensor,
    num_pages: torch.Tensor,
    std_weight: float,
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
        vectors = _rows_of(statistics.vectors, blocks)
        vectors = kind.codes.unpack(vectors) if kind.codes else vectors.float().unflatten(-1, (kind.vectors, -1))
        # Products are [num_kv_heads, vectors, group_size, pages].
        products = features[token] @ vectors.permute(0, 2, 3, 1)
        if statistics.scales is not None:
            scales = _rows_of(statistics.scales, blocks).float().transpose(1, 2).unsqueeze(2)
            products *= scales.repeat_interleave(kind.vectors // scales.shape[1], dim=1)
        raw = kind.combine(products.movedim(1, -1))
        if statistics.spread is not None:
            raw = torch.addcmul(raw, norm[token], _rows_of(statistics.spread, blocks).float().unsqueeze(1))
        scores[token, :, :length] = raw.amax(dim=1)[:, :length]
    return scores
