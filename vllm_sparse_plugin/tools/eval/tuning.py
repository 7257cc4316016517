"""Measurements of `vllm-sparse tune` on given prompts, and the choice of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Column, Table

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.noise import MEASURES, Beside, beside
from vllm_sparse_plugin.tools.eval.report import save_figure
from vllm_sparse_plugin.tools.eval.results import ResultFile
from vllm_sparse_plugin.tools.eval.statistics import Estimate


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
    """By each of `noise.MEASURES`."""
    key_read_share: float
    """Share of keys that decode steps read."""
    key_kept_share: float
    """Share of keys that the cache keeps."""
    kv_read_share: float
    """Share of bytes that decode steps read."""
    memory_share: float
    """Share of bytes that the cache keeps."""
    seconds: float
    """Mean seconds for a prompt and its scored tokens."""

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

    def mean(field: str) -> float:
        shares = [getattr(result, field) for result in results]
        return sum(1.0 if share is None else share for share in shares) / len(shares)

    return Candidate(
        name=name,
        measure=measure,
        kept={each: beside(each, reference, results, repeated) for each in MEASURES},
        key_read_share=mean("key_read_share"),
        key_kept_share=mean("key_kept_share"),
        kv_read_share=mean("kv_read_share"),
        memory_share=mean("memory_share"),
        seconds=mean("seconds"),
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
    """Return the candidate with the least `objective` among those with a mean excess of at most `most_excess`.

    None if only candidates that leave nothing out remain.
    """
    minimised = OBJECTIVES[objective]
    enough = [each for each in candidates if each.excess.value <= most_excess and minimised.keys(each) < 1]
    return min(enough, key=lambda each: (minimised.share(each), each.excess.value), default=None)


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
    for heading in (measure, "excess", "more nats", "KL", "keys read", "keys kept", amount, "s a prompt", ""):
        table.add_column(heading, justify="right")
    for candidate in sorted(candidates, key=minimised.share):
        shares = candidate.key_read_share, candidate.key_kept_share, minimised.share(candidate)
        table.add_row(
            candidate.name, _interval(candidate.kept[measure].found), _percent(candidate.excess),
            *(f"{candidate.kept[each].found.value:.4f}" for each in ("nll", "kl")),
            *(f"{share:.1%}" for share in shares), f"{candidate.seconds:.2f}",
            "chosen" if candidate is chosen else "",
        )  # fmt: skip
    table.add_section()
    nats = (f"{of_dense[each].value:.4f}" for each in ("nll", "kl"))
    table.add_row("dense, other batches", _interval(noise), "0", *nats, *["100.0%"] * 3, "", "")
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
