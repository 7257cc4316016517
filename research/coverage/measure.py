"""What a selection by estimated mass reads of the attention weight, for queries and keys of a model's forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from sparse_kernels.batch import PageSelection, QueryTokens, Softmax
from sparse_kernels.cache import KVCache
from sparse_kernels.page_coverage import page_logits
from sparse_kernels.page_coverage.reference import known_logits
from sparse_kernels.page_score import score_pages

from vllm_sparse_plugin.policies import UniqueSelection
from vllm_sparse_plugin.tools.diagnostics.forward import LayerInputs, PagedLayer

TARGETS = (0.9, 0.95, 0.99)
LEAST_PAGES = 4
QUARTERS = UniqueSelection(statistics="quarters")
DEVIATION = UniqueSelection(statistics="int8")
FIXED = (512, 2048)
"""Budgets in tokens that coverage is compared with."""


@dataclass(frozen=True)
class Reached:
    """What a rule reads, of each query token and KV head; means over the group."""

    mass: torch.Tensor
    """`[num_queries, num_kv_heads]`, true share of the attention weight on what is read."""
    pages: torch.Tensor
    """`[num_queries, num_kv_heads]`, complete pages read."""


@dataclass(frozen=True)
class _Row:
    """One query token: pages in the order in which they are read, those that are always read first."""

    known: torch.Tensor
    """`[num_kv_heads, group_size]`, log of what tokens add to the denominator that are read whatever the query."""
    tail: torch.Tensor
    """The same of the incomplete page alone."""
    exact: torch.Tensor
    """`[num_kv_heads, group_size, num_pages]`, log of what each page adds."""
    ranked: torch.Tensor
    """`[num_kv_heads, num_pages]`, the order."""
    always: torch.Tensor
    """`[num_pages]` bool."""

    @property
    def true_shares(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Shares of the pages `[num_kv_heads, num_pages]` and of the incomplete page `[num_kv_heads]`."""
        return _shares(self.exact, self.tail)

    def reach(self, shares: torch.Tensor, before: torch.Tensor, target: float) -> torch.Tensor:
        """Pages until a share of the weight is reached, `[num_kv_heads]`.

        Args:
            shares: `[num_kv_heads, num_pages]`, of the pages as they are estimated.
            before: `[num_kv_heads]`, of what is read besides.
            target: the share.
        """
        reached = shares.double().gather(-1, self.ranked).cumsum(dim=-1) + before.double()[:, None]
        return ((reached < target).sum(dim=-1) + 1).clamp(LEAST_PAGES, shares.shape[-1])


def _shares(logits: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of the denominator of pages and of what is known; means over the group."""
    total = torch.logaddexp(logits.logsumexp(dim=-1), known)
    return (logits - total[..., None]).exp().mean(dim=1), (known - total).exp().mean(dim=1)


def measure(layer: LayerInputs) -> dict[tuple[str, float], Reached]:
    """What each rule reads, by its name and target.

    `largest` is the operation `page_coverage`. `quarters` differs from it in one thing: a page is estimated by all of
    its quarters, not by the best. The others differ from that: `nothing known` estimates the pages that are always
    read, too; `deviation` estimates a page by the mean and the deviation of its keys to the second order; `as read`
    knows the weight of every page once it is read, and estimates what is not. `true` knows everything. `fixed` reads a
    budget, its target.
    """
    paged, deviated = PagedLayer(layer, QUARTERS), PagedLayer(layer, DEVIATION)
    softmax, size = Softmax(layer.scale), QUARTERS.page_size
    selection = PageSelection(LEAST_PAGES, QUARTERS.sink_pages, QUARTERS.recent_pages)
    cache = KVCache(paged.paged_keys, paged.paged_values, paged.statistics)
    tokens = QueryTokens(layer.query.float(), paged.block_table, layer.context_lens)
    assert paged.statistics is not None
    assert deviated.statistics is not None
    scores = score_pages(layer.query, paged.statistics, paged.block_table, tokens.num_pages(size), 0.0).float()
    keys, _ = paged.statistics.summaries(paged.block_table[0])
    means, spread = deviated.statistics.summaries(deviated.block_table[0])
    assert spread is not None
    found: dict[tuple[str, float], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for index in range(len(tokens)):
        token = tokens[index : index + 1]
        pages = int(token.num_pages(size))
        query = token.query[0]
        known, always = known_logits(token, cache, selection, softmax)
        tail, _ = known_logits(token, cache, replace(selection, sink_pages=0, recent_pages=0), softmax)
        exact = query @ layer.keys[:, : pages * size].float().transpose(1, 2) * layer.scale
        key = scores[index, :, :pages].masked_fill(always, torch.inf)
        ranked = key.sort(dim=-1, descending=True, stable=True).indices
        row = _Row(known, tail, exact.unflatten(-1, (pages, size)).logsumexp(dim=-1), ranked, always)
        best = page_logits(query, keys[:, :pages], size, softmax)
        quarters = torch.einsum("hgd,hpvd->hgpv", query, keys[:, :pages]) * layer.scale
        logits = quarters.logsumexp(dim=-1) + math.log(size / keys.shape[2])
        deviation = layer.scale * query.norm(dim=-1, keepdim=True) * spread[:, None, :pages]
        second = torch.einsum("hgd,hpd->hgp", query, means[:, :pages, 0]) * layer.scale
        second += deviation.square() / (2 * query.shape[-1]) + math.log(size)
        true, true_tail = row.true_shares
        reached_truly = true.gather(-1, ranked).cumsum(dim=-1) + true_tail[:, None]

        def note(name: str, target: float, count: torch.Tensor, reached: torch.Tensor = reached_truly) -> None:
            mass = reached.gather(-1, count[:, None] - 1).squeeze(-1)
            found.setdefault((name, target), []).append((mass, count))

        hidden = [part.masked_fill(always, -torch.inf) for part in (logits, best, second)]
        for target in TARGETS:
            for name, part in zip(("quarters", "largest", "deviation"), hidden, strict=True):
                note(name, target, row.reach(*_shares(part, known), target))
            note("nothing known", target, row.reach(*_shares(logits, tail), target))
            note("as read", target, _as_read(row, logits, target))
            note("true", target, row.reach(true, true_tail, target))
        for budget in FIXED:
            note("fixed", budget, torch.full((len(ranked),), min(budget // size, pages), device=ranked.device))
    return {key: Reached(*(torch.stack(parts) for parts in zip(*rows, strict=True))) for key, rows in found.items()}


def _as_read(row: _Row, logits: torch.Tensor, target: float) -> torch.Tensor:
    """Pages until what is read, which is known, has the target beside what is not, which is estimated."""
    order = row.ranked[:, None].expand_as(logits)
    top = torch.maximum(torch.maximum(row.exact.amax(dim=-1), logits.amax(dim=-1)), row.tail)[..., None]
    read = (row.exact - top).exp().gather(-1, order).cumsum(dim=-1) + (row.tail[..., None] - top).exp()
    estimated = (logits - top).exp().gather(-1, order)
    unread = estimated.flip(-1).cumsum(dim=-1).flip(-1) - estimated
    reached = (read / (read + unread)).mean(dim=1)
    return ((reached < target).sum(dim=-1) + 1).clamp(LEAST_PAGES, reached.shape[-1])
