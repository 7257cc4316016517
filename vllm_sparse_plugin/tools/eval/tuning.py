"""Measurements of `vllm-sparse tune` on given prompts, and the choice of settings."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Column, Table

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.noise import MEASURES, Beside, beside
from vllm_sparse_plugin.tools.eval.report import save_figure
from vllm_sparse_plugin.tools.eval.results import ResultFile
from vllm_sparse_plugin.tools.eval.statistics import Estimate, estimate_excess

_MOST_PROMPTS = 10_000


class Objective(NamedTuple):
    """A quantity to minimise."""

    heading: str
    share: Callable[[Candidate], float]
    """The quantity as a share of dense attention's."""
    keys: Callable[[Candidate], float]
    """The share of keys. A candidate saves something only if it is below 1."""


OBJECTIVES: Mapping[str, Objective] = {
    "bytes": Objective("bytes read per token", lambda each: each.kv_read_share, lambda each: each.key_read_share),
    "memory": Objective("memory of the KV cache", lambda each: each.memory_share, lambda each: each.key_kept_share),
}
"""By name."""


@dataclass(frozen=True)
class Candidate:
    """Loss and cost of some settings. Shares are means over prompts, relative to dense attention."""

    name: str
    measure: str
    """Measure that chooses candidates, one of `noise.SHARES`."""
    kept: Mapping[str, Beside]
    """By each of `noise.MEASURES`, over all prompts."""
    choosing: Estimate
    """Loss beyond the noise of dense attention, by `measure`, over the prompts that choose."""
    judging: Estimate
    """The same over the other prompts."""
    key_read_share: float
    """Share of keys that decode steps read."""
    key_kept_share: float
    """Share of keys that the cache keeps."""
    kv_read_share: float
    """Share of bytes that decode steps read."""
    memory_share: float
    """Share of bytes that the cache keeps."""

    @property
    def excess(self) -> Estimate:
        """Loss beyond the noise of dense attention, by `measure`."""
        excess = self.kept[self.measure].excess
        assert excess is not None
        return excess


def judge(name: str, measure: str, dense: ResultFile, again: ResultFile, sparse: ResultFile) -> Candidate:
    """Compare settings with dense attention on the same prompts.

    Args:
        name: of the settings.
        measure: one of `noise.SHARES`.
        dense: results of dense attention.
        again: results of dense attention in other batches, of the same prompts.
        sparse: results of the settings, of the same prompts.

    Raises:
        ConfigurationError: the prompts, the model or the versions changed between two of the runs.
    """
    _expect_same(dense, again)
    _expect_same(dense, sparse)
    results, repeated = ([file.results[item] for item in dense.results] for file in (sparse, again))
    reference = list(dense.results.values())

    def half(first: int) -> Estimate:
        excess = beside(measure, reference[first::2], results[first::2], repeated[first::2]).excess
        assert excess is not None
        return excess

    def mean(field: str) -> float:
        shares = [getattr(result, field) for result in results]
        return sum(1.0 if share is None else share for share in shares) / len(shares)

    return Candidate(
        name=name,
        measure=measure,
        kept={each: beside(each, reference, results, repeated) for each in MEASURES},
        choosing=half(0),
        judging=half(1) if len(reference) > 1 else Estimate(math.nan, -math.inf, math.inf, 0),
        key_read_share=mean("key_read_share"),
        key_kept_share=mean("key_kept_share"),
        kv_read_share=mean("kv_read_share"),
        memory_share=mean("memory_share"),
    )


def _expect_same(dense: ResultFile, other: ResultFile) -> None:
    def prompts(file: ResultFile) -> dict[str, str]:
        return {item: result.digest for item, result in file.results.items()}

    def model(file: ResultFile) -> Any:
        return (file.settings.get("contents") or {}).get("model")

    same = {
        "prompts": prompts(dense) == prompts(other),
        "model": model(dense) == model(other),
        "versions": dense.settings.get("versions") == other.settings.get("versions"),
    }
    if changed := [name for name, is_same in same.items() if not is_same]:
        raise ConfigurationError(
            f"output: got {str(dense.path)!r} and {str(other.path)!r} of other {' and '.join(changed)}, allowed: a new "
            "folder, and inputs that do not change during a run"
        )


def choose(candidates: Sequence[Candidate], most_excess: float, objective: str) -> Candidate | None:
    """Return the candidate with the least `objective` among those whose prompts that choose show an excess of at most
    `most_excess`: the whole interval. The other prompts must confirm it.

    None if only candidates that leave nothing out remain.
    """
    minimised = OBJECTIVES[objective]
    enough = [each for each in candidates if each.choosing.high <= most_excess and minimised.keys(each) < 1]
    return min(enough, key=lambda each: (minimised.share(each), each.choosing.value), default=None)


def needed_prompts(most_excess: float, scored_tokens: int) -> int:
    """Return the least number of prompts with which settings that change nothing are shown to lose at most
    `most_excess`; at most `_MOST_PROMPTS`."""

    def shows(count: int) -> bool:
        return estimate_excess([1.0] * (count // 2), [1.0] * (count // 2), scored_tokens).high <= most_excess

    return 4 + bisect_left(range(4, _MOST_PROMPTS), True, key=shows)


def frontier_table(candidates: Sequence[Candidate], chosen: Candidate | None, objective: str) -> Table:
    """Return a row per candidate, the least `objective` first."""
    minimised, measure = OBJECTIVES[objective], candidates[0].measure
    of_dense = {name: found.own for name, found in candidates[0].kept.items() if found.own is not None}
    noise = of_dense[measure]
    table = Table(
        Column("settings", no_wrap=True),
        title=f"Least {minimised.heading} first. Excess: {measure} lost beyond the noise of dense attention.\n"
        f"Dense attention keeps {_interval(noise)} of itself in other batches. 95 % intervals.",
    )  # fmt: skip
    amount = "bytes read" if objective == "bytes" else "memory"
    headings = measure, "excess", "half that chooses", "half that judges", "KL", "keys read", "keys kept", amount, ""
    for heading in headings:
        table.add_column(heading, justify="right")
    for candidate in sorted(candidates, key=minimised.share):
        shares = candidate.key_read_share, candidate.key_kept_share, minimised.share(candidate)
        table.add_row(
            candidate.name, _interval(candidate.kept[measure].found), _percent(candidate.excess),
            _percent(candidate.choosing), _percent(candidate.judging), f"{candidate.kept['kl'].found.value:.4f}",
            *(f"{share:.1%}" for share in shares),
            "chosen" if candidate is chosen else "",
        )  # fmt: skip
    table.add_section()
    table.add_row(
        "dense, other batches", _interval(noise), "0", "0", "0", f"{of_dense['kl'].value:.4f}", *["100.0%"] * 3, ""
    )
    return table


def plot_frontier(candidates: Sequence[Candidate], most_excess: float, objective: str, path: Path) -> None:
    """Draw the excess against what is minimised.

    Raises:
        ConfigurationError: the plot cannot be written.
    """
    from matplotlib.figure import Figure

    minimised, measure = OBJECTIVES[objective], candidates[0].measure
    figure = Figure(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    ordered = sorted(candidates, key=minimised.share)
    shares = [100 * minimised.share(each) for each in ordered]
    panel.plot(shares, [100 * each.excess.value for each in ordered], "o", markersize=4)
    for share, each in zip(shares, ordered, strict=True):
        excess = each.excess
        if excess.count > 1:
            panel.vlines([share], [100 * excess.low], [100 * excess.high], "C0")
        place = share, 100 * excess.value
        panel.annotate(each.name, place, xytext=(5, 5), textcoords="offset points", fontsize=8)
    panel.axhline(0, color="black", linewidth=0.8)
    panel.axhline(100 * most_excess, color="black", linewidth=0.8, linestyle="--")
    panel.set_xscale("log")
    panel.set_xlabel(f"{minimised.heading}, % of dense attention")
    panel.set_ylabel(f"{measure} lost beyond the noise of dense attention, %")
    panel.grid(alpha=0.3)
    save_figure(figure, path)


def _interval(found: Estimate) -> str:
    return f"{found.value:.3f}" + (f" [{found.low:.3f}, {found.high:.3f}]" if found.count > 1 else "")


def _percent(found: Estimate) -> str:
    interval = f" [{100 * found.low:+.1f}, {100 * found.high:+.1f}]" if found.count > 1 else ""
    return f"{100 * found.value:+.1f}%{interval}"
