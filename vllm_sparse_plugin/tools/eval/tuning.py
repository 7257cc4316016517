"""Which settings keep a chosen quality on given prompts: what `vllm-sparse tune` measures and how it chooses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Column, Table

from vllm_sparse_plugin.tools.eval.fidelity import agreement, overlap
from vllm_sparse_plugin.tools.eval.report import save_figure
from vllm_sparse_plugin.tools.eval.results import Result, ResultFile
from vllm_sparse_plugin.tools.eval.statistics import Estimate, estimate_mean


def _likelihood(dense: Result, sparse: Result) -> float:
    return min(math.exp(dense.score - sparse.score), 1.0)


MEASURES: Mapping[str, Callable[[Result, Result], float]] = {
    "agreement": lambda dense, sparse: agreement(dense.predictions, sparse.predictions),
    "overlap": lambda dense, sparse: overlap(dense.predictions, sparse.predictions),
    "likelihood": _likelihood,
}
"""What is kept of dense attention, by name; 1 is everything. Of one prompt:

- agreement: share of positions whose most likely next token is dense attention's.
- overlap: of the distributions of the next token, see `fidelity.overlap`.
- likelihood: how likely the text is, as a share of how likely it is with dense attention, per token; at most 1.
"""


@dataclass(frozen=True)
class Candidate:
    """What some settings keep of dense attention, and what they read."""

    name: str
    measure: str
    """One of `MEASURES`, by which candidates are chosen."""
    kept: Mapping[str, Estimate]
    """Over prompts, by each of `MEASURES`."""
    kv_read_share: float
    """Mean share of the cached keys and values that decode steps read."""
    seconds: float
    """Mean time of a prompt and its scored tokens."""
    reads_everything: bool = False
    """Whether every decode step read its whole context, which is dense attention."""

    @property
    def quality(self) -> Estimate:
        """What is kept by the measure that counts."""
        return self.kept[self.measure]


def judge(name: str, measure: str, dense: ResultFile, sparse: ResultFile) -> Candidate:
    """Return what settings keep on the prompts that dense attention was asked too.

    Args:
        name: of the settings.
        measure: one of `MEASURES`.
        dense: results of dense attention.
        sparse: results of the settings, of the same prompts.
    """
    results = [sparse.results[item] for item in dense.results]
    shares = [1.0 if result.kv_read_share is None else result.kv_read_share for result in results]
    seconds = [result.seconds for result in results]
    positions = min(len(result.predictions) for result in results)
    kept = {
        name: estimate_mean([keeps(dense.results[result.id], result) for result in results], max(positions, 2))
        for name, keeps in MEASURES.items()
    }
    whole = all(result.kv_read_share is not None and result.kv_read_share >= 1 for result in results)
    return Candidate(name, measure, kept, sum(shares) / len(shares), sum(seconds) / len(seconds), whole)


def choose(candidates: Sequence[Candidate], target: float) -> Candidate | None:
    """Return the candidate that reads least of those that keep `target` on average; None if none does but those that
    read everything."""
    enough = [each for each in candidates if each.quality.value >= target and not each.reads_everything]
    return min(enough, key=lambda candidate: (candidate.kv_read_share, -candidate.quality.value), default=None)


def frontier_table(candidates: Sequence[Candidate], measure: str, chosen: Candidate | None) -> Table:
    """Return a row for each candidate, that which reads least first."""
    table = Table(Column("settings", no_wrap=True), title="What is kept of dense attention, with intervals of 95 %")
    for heading in (measure, "KV read", "seconds a prompt", ""):
        table.add_column(heading, justify="right")
    for candidate in sorted(candidates, key=lambda each: each.kv_read_share):
        quality = candidate.quality
        interval = f" [{quality.low:.3f}, {quality.high:.3f}]" if quality.count > 1 else ""
        table.add_row(
            candidate.name, f"{quality.value:.3f}{interval}", f"{candidate.kv_read_share:.1%}",
            f"{candidate.seconds:.2f}", "chosen" if candidate is chosen else "",
        )  # fmt: skip
    return table


def plot_frontier(candidates: Sequence[Candidate], measure: str, target: float, path: Path) -> None:
    """Draw quality against the share of the cache that is read.

    Raises:
        ConfigurationError: if the picture cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    ordered = sorted(candidates, key=lambda each: each.kv_read_share)
    shares = [100 * each.kv_read_share for each in ordered]
    panel.plot(shares, [each.quality.value for each in ordered], marker="o", markersize=4)
    for share, each in zip(shares, ordered, strict=True):
        if each.quality.count > 1:
            panel.vlines([share], [each.quality.low], [each.quality.high], "C0")
        panel.annotate(
            each.name, (share, each.quality.value), xytext=(5, -10), textcoords="offset points", fontsize=8
        )  # fmt: skip
    panel.axhline(target, color="black", linewidth=0.8, linestyle="--")
    panel.set_xscale("log")
    panel.set_xlabel("KV cache read by a decode step, %")
    panel.set_ylabel(f"{measure} with dense attention")
    panel.grid(alpha=0.3)
    save_figure(figure, path)
