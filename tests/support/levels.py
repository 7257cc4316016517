"""The bits of scores in two levels."""

import torch
from support.paged import PagedBatch


def exact_scores(query: torch.Tensor, batch: PagedBatch, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and whole scores `[num_kv_heads, num_pages]` bfloat16: integers, then one float32 rounding after another.

    Args:
        query: `[num_kv_heads, group_size, head_size]`.
    """
    blocks = batch.block_table[request, : -(-int(batch.num_pages[request]) // batch.statistics.pages_per_block)]
    codes, steps, _ = batch.statistics.records(blocks)
    query = query.float()
    query[..., :4] = 0
    unit = query.abs().amax(dim=-1, keepdim=True) / 32512
    fixed = (query * (1 / unit)).round()
    # Twice a code is an odd integer. Sums of integers below 2^53 are exact in float64.
    sums = torch.einsum("hgd,hpvd->hgpv", fixed.double(), 2 * codes.double())
    m, u, v, w = ((sums.float() * (unit * 0.5)[..., None]) * steps[:, None]).unbind(dim=-1)
    whole = m + torch.maximum(u + v.abs(), w.abs() - u)
    pages = int(batch.num_pages[request])
    return tuple(part.bfloat16().amax(dim=1)[:, :pages] for part in (m, whole))
