"""Attention of the newest tokens of a sequence under the hard mask. It gathers the pages that each token reads.

It runs in torch on every device. Tests compare it with `reference`, which computes the logits of all pages.
"""

from __future__ import annotations

import torch

from sparse_kernels.masked_attention import reference
from sparse_kernels.masked_attention.records import PageRecords
from sparse_kernels.masked_attention.rule import PageMask


def newest_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    records: PageRecords,
    mask: PageMask,
    scale: float,
) -> torch.Tensor:
    """See `api.newest_attention`; the mask is hard."""
    first, page_size = len(key) - len(query), mask.page_size
    whole_queries = min(max(mask.whole_tokens - first, 0), len(query))
    if whole_queries == len(query):
        return reference.newest_attention(query, key, value, records, mask, scale)
    outputs = []
    if whole_queries:
        end = first + whole_queries
        parts = query[:whole_queries], key[:end], value[:end], records[: end // page_size]
        outputs.append(reference.newest_attention(*parts, mask, scale))
    grouped, keys, values = reference.by_head(query[whole_queries:], key, value)
    context = torch.arange(first + whole_queries + 1, len(key) + 1, device=query.device)
    with torch.no_grad():
        pages = _pages_read(grouped, records, context, mask)
    incomplete = (context // page_size)[:, None].expand(len(keys), -1, 1)
    starts = torch.cat([pages, incomplete], dim=-1) * page_size
    position = (starts[..., None] + torch.arange(page_size, device=query.device)).flatten(2)
    hidden = (position >= context[:, None])[:, None]
    read_keys, read_values = (_gather(x, position) for x in (keys, values))
    logits = torch.einsum("hgtd,htnd->hgtn", grouped, read_keys) * scale
    weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    attended = torch.einsum("hgtn,htnd->hgtd", weights, read_values)
    outputs.append(attended.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype))
    return torch.cat(outputs)


def _pages_read(query: torch.Tensor, records: PageRecords, context: torch.Tensor, mask: PageMask) -> torch.Tensor:
    """Returns the K complete pages that each token reads: `[num_kv_heads, num_tokens, K]`.

    Contexts must have more than K pages. As in `reference.log_mask`, scores are rounded to bfloat16, and ties go to the
    lowest pages.
    """
    selection, complete = mask.selection, (context // mask.page_size)[:, None]
    scores = reference.page_scores(query, records.vectors, records.spread, selection.std_weight).bfloat16()
    page = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill((page < selection.sink_pages) | (page >= complete - selection.recent_pages), torch.inf)
    scores = scores.masked_fill(page >= complete, -torch.inf)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., : selection.k]


def _gather(rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Returns `[num_kv_heads, num_tokens, n, head_size]`: rows `[num_kv_heads, 1, num_rows, head_size]` by position."""
    heads, _, num_rows, size = rows.shape
    head = torch.arange(heads, device=rows.device)[:, None, None]
    # The missing tokens of an incomplete page are masked, so any row may stand for them.
    index = position.clamp(max=num_rows - 1) + head * num_rows
    return rows.reshape(-1, size).index_select(0, index.flatten()).view(*position.shape, size)
