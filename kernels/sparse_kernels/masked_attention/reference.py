"""Attention under a page mask in torch: the specification, and the path for devices without kernels.

It computes whole matrices of logits, one sequence at a time. torch computes the gradients.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from sparse_kernels.masked_attention.packing import Packing
from sparse_kernels.masked_attention.records import PageRecords
from sparse_kernels.masked_attention.rule import PageMask

_TINY = 1e-30
"""The divisor that replaces an attention sum of zero."""


def stop_gradient(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor without gradient: sg in the paper."""
    return x.detach()


def page_scores(
    query: torch.Tensor, vectors: torch.Tensor, spread: torch.Tensor | None, std_weight: float
) -> torch.Tensor:
    """Returns the scores of pages for each token (UNIQUE, Eq. 3 and 6).

        S_p = max_g ( max_v q_g . x_pv + lambda sg(||q_g||_2) sigma_p )

    The gradient goes to the head and the vector with the largest product, of equal ones to the first. ||q|| has none.

    Args:
        query: `[num_kv_heads, group_size, num_tokens, head_size]`.
        vectors: `[num_pages, num_kv_heads, vectors, head_size]`.
        spread: `[num_pages, num_kv_heads]` or None.
        std_weight: lambda.

    Returns:
        `[num_kv_heads, num_tokens, num_pages]`.
    """
    products = torch.einsum("hgtd,phvd->hgtpv", query.to(vectors.dtype), vectors)
    scores = _first_largest(products, -1)
    if spread is not None:
        norm = stop_gradient(query.to(vectors.dtype).norm(dim=-1))
        scores = scores + std_weight * norm[..., None] * spread.T[:, None, None]
    return _first_largest(scores, 1)


def _first_largest(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the largest element along a dimension. The gradient goes to the first of equal elements."""
    if x.shape[dim] == 1:
        return x.squeeze(dim)
    values, last = x.detach(), x.shape[dim] - 1
    best = values.amax(dim=dim, keepdim=True)
    # A NaN equals no element, so the last element is the default. argmax is slow for few elements.
    index = torch.full_like(best, last, dtype=torch.int64)
    for place in reversed(range(last)):
        index = torch.where(values.narrow(dim, place, 1) == best, place, index)
    return x.gather(dim, index).squeeze(dim)


def always_read(num_tokens: int, num_pages: int, mask: PageMask, device: torch.device, first: int = 0) -> torch.Tensor:
    """Returns which pages a token reads independent of scores: `[num_tokens - first, num_pages]` bool.

    These are the first and the newest complete pages, pages that are not complete before the token, and all pages of
    contexts that are read whole.
    """
    selection = mask.selection
    context = torch.arange(first + 1, num_tokens + 1, device=device)[:, None]
    complete, page = context // mask.page_size, torch.arange(num_pages, device=device)
    is_dense = (complete <= selection.k) | (context <= mask.dense_tokens)
    return is_dense | (page < selection.sink_pages) | (page >= complete - selection.recent_pages)


def log_mask(scores: torch.Tensor, always: torch.Tensor, mask: PageMask, scale: float) -> torch.Tensor:
    """Returns the logarithm of the mask. It is added to the logits of a page's tokens.

        soft:  log m_p = log sigmoid( s (S_p - tau) / T ),  tau = sg( (S_(K) + S_(K+1)) / 2 )
        hard:  0 for the K best pages (ties go to the lowest), and -inf for the others

    K is the budget minus the pages that are always read. Those pages have log m = 0 and are not ranked. For the hard
    mask, scores are rounded to bfloat16 as in serving.

    Args:
        scores: `[num_kv_heads, num_tokens, num_pages]`.
        always: see `always_read`.
        mask: the rule.
        scale: s, the factor of logits; T is in units of logits.

            Returns:
        A tensor of the shape of `scores`.
    """
    selection = mask.selection
    left = selection.k - selection.sink_pages - selection.recent_pages
    open_to_choice = ~always.all(dim=1)
    output = torch.zeros_like(scores)
    if not open_to_choice.any():
        return output
    scores, always = scores[:, open_to_choice], always[open_to_choice]
    candidates = scores.detach().masked_fill(always, -torch.inf)
    if mask.temperature is None:
        ranked = candidates.bfloat16().sort(dim=-1, descending=True, stable=True).indices
        read = (ranked.argsort(dim=-1) < left) | always
        chosen = torch.zeros_like(scores).masked_fill(~read, -torch.inf)
    else:
        best = candidates.topk(left + 1, dim=-1).values
        threshold = stop_gradient((best[..., left - 1] + best[..., left]) / 2)
        soft = functional.logsigmoid((scores - threshold[..., None]) * (scale / mask.temperature))
        chosen = soft.masked_fill(always, 0.0)
    head = torch.arange(output.shape[0], device=scores.device)
    return output.index_put((head[:, None], open_to_choice.nonzero().T), chosen)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    records: PageRecords,
    packing: Packing,
    mask: PageMask,
    scale: float,
) -> torch.Tensor:
    """See `api.masked_attention`."""
    outputs = []
    for begin, length, first_page, num_pages in packing.sequences(mask.page_size):
        tokens, pages = slice(begin, begin + length), slice(first_page, first_page + num_pages)
        outputs.append(newest_attention(query[tokens], key[tokens], value[tokens], records[pages], mask, scale))
    return torch.cat(outputs)


def newest_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    records: PageRecords,
    mask: PageMask,
    scale: float,
) -> torch.Tensor:
    """See `api.newest_attention`."""
    length, first, dtype = len(key), len(key) - len(query), query.dtype
    grouped, keys, values = by_head(query, key, value)
    logits = grouped @ keys.transpose(-1, -2) * scale
    scores = page_scores(grouped, records.vectors, records.spread, mask.selection.std_weight)
    always = always_read(length, len(records.vectors), mask, query.device, first)
    by_page = log_mask(scores, always, mask, scale).to(logits.dtype)
    by_token = functional.pad(by_page.repeat_interleave(mask.page_size, dim=-1), (0, length % mask.page_size))
    position = torch.arange(length, device=query.device)
    logits = (logits + by_token[:, None]).masked_fill(position > position[first:, None], -torch.inf)
    output: torch.Tensor = (logits.softmax(dim=-1) @ values).permute(2, 0, 1, 3).flatten(1, 2)
    return output.to(dtype)


@torch.no_grad()
def dense_shares(query: torch.Tensor, key: torch.Tensor, page_size: int, scale: float) -> torch.Tensor:
    """See `api.dense_shares`."""
    length, first = len(key), len(key) - len(query)
    grouped, keys = by_head(query, key)
    position = torch.arange(length, device=query.device)
    logits = grouped @ keys.transpose(-1, -2) * scale
    weights = logits.masked_fill(position > position[first:, None], -torch.inf).softmax(dim=-1).mean(dim=1)
    pages = length // page_size
    shares: torch.Tensor = weights[..., : pages * page_size].unflatten(-1, (pages, page_size)).sum(dim=-1)
    return shares


def selection_loss(
    query: torch.Tensor, num_tokens: int, records: PageRecords, shares: torch.Tensor, mask: PageMask, scale: float
) -> torch.Tensor:
    """See `api.selection_loss`."""
    grouped = by_head(query, records.vectors)[0]
    always = always_read(num_tokens, len(records.vectors), mask, query.device, num_tokens - len(query))
    scores = page_scores(grouped, records.vectors, records.spread, mask.selection.std_weight) * scale
    # A token that reads everything chooses no page. Its row must not be a softmax over nothing.
    likely = scores.masked_fill(always & ~always.all(dim=1, keepdim=True), -torch.inf).log_softmax(dim=-1)
    shares = shares.masked_fill(always, 0.0)
    wanted = torch.xlogy(shares, shares / shares.sum(dim=-1, keepdim=True).clamp(min=_TINY))
    loss: torch.Tensor = (wanted - shares * likely.masked_fill(always, 0.0)).sum()
    return loss


def by_head(query: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """Returns queries as `[num_kv_heads, group_size, num_tokens, head_size]`, keys and values with a group of one."""
    query, *rest = (x if x.dtype == torch.float64 else x.float() for x in (query, *others))
    grouped = query.unflatten(1, (rest[0].shape[1], -1)).permute(1, 2, 0, 3)
    return [grouped, *(x.transpose(0, 1)[:, None] for x in rest)]
