"""Attention weight that a selection reads, by statistics, page size, and budget or coverage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.page_coverage.reference import count_best
from sparse_kernels.page_topk.reference import select_pages

from bench.common.results import Row
from research.selection.statistics import Pages, Scores, Statistics
from vllm_sparse_plugin.metrics.quality import Context, measure
from vllm_sparse_plugin.tools.diagnostics.forward import LayerInputs

SINK_PAGES = RECENT_PAGES = 1
"""Pages that are always read, as in the policies' defaults."""
LEAST_TOKENS = 128
"""Minimum tokens read under a coverage, as in `unique`'s default."""
LEAST_PAGES = SINK_PAGES + RECENT_PAGES + 1
"""Minimum budget: one selected page besides the pages that are always read."""
TOO_FEW = 0.05
"""A token and KV head miss their coverage if they read less than it by more than this."""
BUDGET, COVERAGE = "budget", "coverage"


class Grid(NamedTuple):
    """Budgets and coverages to measure."""

    page_sizes: Sequence[int]
    budgets: Sequence[int]
    """In tokens."""
    coverages: Sequence[float]
    """Shares of the attention weight, for statistics that estimate it."""


def measure_layer(layer: LayerInputs, statistics: Mapping[str, Statistics], grid: Grid) -> Iterator[Row]:
    """Yield a row for each statistics, page size, and budget or coverage: means over query tokens and KV heads."""
    for size in grid.page_sizes:
        pages = Pages.of(layer, size)
        for name, kind in statistics.items():
            scored = kind.score(pages)
            about = {"statistics": name, "page_size": size, "record_bytes": scored.record_bytes}
            for budget in (budget for budget in grid.budgets if budget // size >= LEAST_PAGES):
                counts = torch.full(scored.scores.shape[:2], budget // size, device=layer.keys.device)
                yield about | {"rule": BUDGET, "target": budget} | _row(pages, scored, counts)
            for share in grid.coverages if scored.log_weights is not None else ():
                counts = count_coverage(pages, scored, share)
                yield about | {"rule": COVERAGE, "target": share} | _row(pages, scored, counts, share)


def count_coverage(pages: Pages, scored: Scores, share: float) -> torch.Tensor:
    """Count the pages that reach an estimated share of the attention weight: `[num_queries, num_kv_heads]` int64."""
    assert scored.log_weights is not None
    complete, page = (
        pages.complete[:, None, None],
        torch.arange(pages.log_weights.shape[-1], device=pages.complete.device),
    )
    always = (page < SINK_PAGES) | (page >= complete - RECENT_PAGES)
    # The weight of pages that are always read is known. The incomplete page follows the complete ones.
    known = pages.log_weights.masked_fill(~(always & (page <= complete))[:, :, None], -torch.inf).logsumexp(dim=-1)
    missing = page[: pages.count] >= complete
    estimate = scored.log_weights.masked_fill(missing[:, :, None], -torch.inf)
    of_pages = always[..., : pages.count]
    key = scored.scores.float().masked_fill(of_pages, torch.inf).masked_fill(missing, -torch.inf)
    counts = count_best(estimate, known, of_pages, key, share).minimum(pages.complete[:, None])
    return counts.clamp(min=max(LEAST_TOKENS // pages.size, LEAST_PAGES))


def _row(pages: Pages, scored: Scores, counts: torch.Tensor, share: float | None = None) -> Row:
    layer = pages.layer
    chosen = select_pages(scored.scores, pages.complete, int(counts.max()), SINK_PAGES, RECENT_PAGES, counts)
    context = Context([layer.keys], [layer.values])
    quality = measure(layer.query, context, layer.context_lens, chosen, pages.size, Softmax(layer.scale))
    columns = {
        "recall": quality.recall, "mass": quality.mass, "oracle_mass": quality.oracle_mass, "cosine": quality.cosine,
        "pages": (chosen >= 0).sum(dim=-1).float(),
    }  # fmt: skip
    if share is not None:
        columns["below"] = (quality.mass < share - TOO_FEW).float()
    return {name: round(column.mean().item(), 5) for name, column in columns.items()}
