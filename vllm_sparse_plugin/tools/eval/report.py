"""Tables and plots of result files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.table import Column, Table

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.eval.items import NLL, TEXT_TASKS
from vllm_sparse_plugin.tools.eval.noise import MEASURES, beside
from vllm_sparse_plugin.tools.eval.results import Result, ResultFile
from vllm_sparse_plugin.tools.eval.statistics import (
    Difference,
    Estimate,
    estimate_amount,
    estimate_amount_difference,
    estimate_difference,
    estimate_mean,
)
from vllm_sparse_plugin.tools.provenance import check_output, replacing

PLOT_SUFFIXES = (".png", ".svg")
_ALL = "all"
_COLUMNS = 4
_LEAST_P = 0.001
"""Smaller p-values are not shown: rounded, they would be 0."""
SHARES = {"keys read": "key_read_share", "keys kept": "key_kept_share", "bytes read": "kv_read_share"}
"""Shares of a result, by column heading."""
_Estimated = TypeVar("_Estimated", Estimate, Difference)
Place = tuple[str, int]
"""A task and a context in tokens."""


def estimates(results: Sequence[Result]) -> dict[Place, Estimate]:
    """Estimate the mean of each task and context, and of all scores of a context with several tasks.

    The values of perplexity are perplexities.
    """
    found: dict[Place, Estimate] = {}
    for place, part in _places(results).items():
        scores = [result.score for result in part]
        if part[0].metric != NLL:
            found[place] = estimate_mean(scores, documents=[result.sample for result in part])
            continue
        found[place] = _exponential(estimate_amount(scores))
    return found


def shared_items(first: ResultFile, second: ResultFile) -> list[str]:
    """Return the items that both files have, in order.

    Raises:
        ConfigurationError: there are none, or a prompt or answer differs.
    """
    shared = [name for name in first.results if name in second.results]
    for name in shared:
        if first.results[name].digest != second.results[name].digest:
            raise ConfigurationError(
                f"results: got {str(first.path)!r} and {str(second.path)!r}, whose item {name} differs, allowed: "
                "runs with the same tokenizer, seed and files"
            )
    if not shared:
        raise ConfigurationError(
            f"results: got {str(first.path)!r} and {str(second.path)!r} without an item in common, allowed: runs of "
            "the same tasks and contexts"
        )
    return shared


def differences(first: ResultFile, second: ResultFile) -> dict[Place, Difference]:
    """Estimate how much larger the second's scores are on the shared items.

    The values of perplexity are ratios of perplexities.

    Raises:
        ConfigurationError: as `shared_items`.
    """
    shared = shared_items(first, second)
    found: dict[Place, Difference] = {}
    for place, part in _places([first.results[name] for name in shared]).items():
        scores = [[held.results[result.id].score for result in part] for held in (first, second)]
        if part[0].metric != NLL:
            found[place] = estimate_difference(scores[0], scores[1], [result.sample for result in part])
            continue
        found[place] = _exponential(estimate_amount_difference(*scores))
    return found


def score_table(files: Sequence[ResultFile]) -> Table:
    """Return a row for each task and context, with the score and its interval in each file.

    Files from an engine in this process also get the shares read and kept, relative to dense attention.
    """
    found = [estimates(list(file.results.values())) for file in files]
    shares = [_known_shares(file) for file in files]
    table = Table(Column("task", no_wrap=True), title="Mean scores and perplexities, with 95 % intervals")
    for heading in ("context", "items"):
        table.add_column(heading, justify="right")
    for file, of_file in zip(files, shares, strict=True):
        table.add_column(_heading(file), justify="right")
        for heading in of_file:
            table.add_column(heading, justify="right")
    for place in _order(found):
        cells = []
        for scores, of_file in zip(found, shares, strict=True):
            cells.append(_interval(scores[place]) if place in scores else "-")
            cells += [f"{share[place]:.1%}" if place in share else "-" for share in of_file.values()]
        counts = {scores[place].count for scores in found if place in scores}
        table.add_row(
            place[0], f"{place[1]:,}", "/".join(map(str, sorted(counts))), *cells, end_section=place[0] == _ALL
        )
    return table


def _known_shares(file: ResultFile) -> dict[str, dict[Place, float]]:
    """Return the mean shares of keys and bytes, by column heading, for each place where every answer has them."""
    found: dict[str, dict[Place, float]] = {}
    for place, part in _places(list(file.results.values())).items():
        for heading, field in SHARES.items():
            known = [share for result in part if (share := getattr(result, field)) is not None]
            if len(known) == len(part):
                found.setdefault(heading, {})[place] = sum(known) / len(known)
    return found


def difference_table(first: ResultFile, second: ResultFile) -> Table:
    """Return a row for each task and context in both files, with the difference on the same items."""
    found = differences(first, second)
    shared = [result for result in first.results.values() if result.id in second.results]
    before = estimates(shared)
    after = estimates([second.results[result.id] for result in shared])
    table = Table(
        Column("task", no_wrap=True),
        title=f"{_heading(second)} compared with {_heading(first)}, same items; 95 % intervals; perplexity: the ratio",
    )
    for heading in ("context", "items", _heading(first), _heading(second), "difference", "p"):
        table.add_column(heading, justify="right")
    for place, difference in found.items():
        signed = "" if place[0] in TEXT_TASKS else "+"
        table.add_row(
            place[0], f"{place[1]:,}", str(difference.count),
            f"{before[place].value:.3f}", f"{after[place].value:.3f}",
            _interval(difference, signed),
            f"{difference.p_value:.3f}" if difference.p_value >= _LEAST_P else f"< {_LEAST_P}",
            end_section=place[0] == _ALL,
        )  # fmt: skip
    return table


def fidelity_table(first: ResultFile, second: ResultFile, again: ResultFile | None = None) -> Table | None:
    """Return how close the next tokens of two runs are in the same text, by context; None without such text.

    Each window of text is one sample, because positions in a window depend on each other.

    Args:
        first: a run, such as of dense attention.
        second: the run to judge.
        again: the first run in other batches, which measures the noise; None without such a run.

    Raises:
        ConfigurationError: see `shared_items`.
    """
    held = [first, second] if again is None else [first, second, again]
    shared = shared_items(first, again) if again is not None else list(first.results)
    runs = [[file.results[name] for file in held] for name in shared if name in second.results]
    runs = [each for each in runs if all(result.predictions for result in each)]
    if not runs:
        return None
    table = Table(
        Column("context", justify="right"), "of the next tokens",
        title=f"Next tokens of {_heading(second)} compared with {_heading(first)}, same text; 95 % intervals",
    )  # fmt: skip
    for heading in ("windows", "positions", _heading(second), f"{first.label} with itself", "excess"):
        table.add_column(heading, justify="right")
    for context in sorted({each[0].context_tokens for each in runs}):
        of_first, of_second, *of_again = zip(*(each for each in runs if each[0].context_tokens == context), strict=True)
        positions = sum(len(result.predictions) for result in of_first)
        for name, measure in MEASURES.items():
            line = beside(name, of_first, of_second, of_again[0] if of_again else None)
            table.add_row(
                f"{context:,}", measure.heading, str(len(of_first)), str(positions), _interval(line.found),
                "not measured" if line.own is None else _interval(line.own),
                "not measured" if line.excess is None else _interval(line.excess, "+"),
                end_section=name == list(MEASURES)[-1],
            )  # fmt: skip
    return table


def plot_scores(files: Sequence[ResultFile], path: Path) -> None:
    """Draw scores against context: a panel per task, a line per file, error bars for the intervals.

    Raises:
        ConfigurationError: the plot cannot be written.
    """
    from matplotlib.figure import Figure

    found = [(_heading(file), estimates(list(file.results.values()))) for file in files]
    places = _order([each for _, each in found])
    tasks = list(dict.fromkeys(task for task, _ in places))
    contexts = sorted({context for _, context in places})
    if not tasks:
        raise ConfigurationError("plot: got files without a result, allowed: files with one or more")
    columns = min(len(tasks), _COLUMNS)
    rows = math.ceil(len(tasks) / columns)
    figure = Figure(figsize=(2.6 * columns + 0.6, 2 * rows + 0.8), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in panels[len(tasks) :]:
        panel.set_visible(False)
    for panel, task in zip(panels, tasks, strict=False):
        for i, (label, each) in enumerate(found):
            shift = 0.08 * (i - (len(found) - 1) / 2)
            points = [(contexts.index(context) + shift, each[name, context]) for name, context in each if name == task]
            values = [estimate.value for _, estimate in points]
            panel.plot([place for place, _ in points], values, marker="o", markersize=4, color=f"C{i}", label=label)
            for place, estimate in points:
                if math.isfinite(estimate.high):
                    panel.vlines(place, estimate.low, estimate.high, f"C{i}")
        panel.set_xticks(range(len(contexts)), [_tokens(context) for context in contexts])
        panel.set_xlim(-0.5, len(contexts) - 0.5)
        if task not in TEXT_TASKS:
            panel.set_ylim(-0.04, 1.04)
        panel.set_title(task, fontsize=9)
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    figure.supxlabel("context, tokens", fontsize=9)
    with replacing(path, "plot") as part:
        figure.savefig(part, dpi=150, bbox_inches="tight")


def check_plot(path: Path | None) -> None:
    """Refuse a plot that cannot be written, before anything is computed.

    Raises:
        ConfigurationError: the name has another ending, or the file cannot be written.
    """
    if path is None:
        return
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigurationError(f"plot: got {str(path)!r}, allowed: a name that ends in {' or '.join(PLOT_SUFFIXES)}")
    check_output(path, "plot")


def _places(results: Sequence[Result]) -> dict[Place, list[Result]]:
    """Return results by task and context, and those of all scored tasks of a context."""
    found: dict[Place, list[Result]] = {}
    for context in sorted({result.context_tokens for result in results}):
        in_context = [result for result in results if result.context_tokens == context]
        for task in dict.fromkeys(result.task for result in in_context):
            found[task, context] = [result for result in in_context if result.task == task]
        scored = [result for result in in_context if result.metric != NLL]
        if len({result.task for result in scored}) > 1:
            found[_ALL, context] = scored
    return found


def _order(found: Sequence[dict[Place, Estimate]]) -> list[Place]:
    """Return the places of several files by context, those of all tasks last."""
    places = dict.fromkeys(place for each in found for place in each)
    return sorted(places, key=lambda place: (place[1], place[0] == _ALL))


def _heading(file: ResultFile) -> str:
    return f"{file.label}, from the question" if file.settings["decode_from"] == "question" else file.label


def _interval(found: Estimate | Difference, sign: str = "") -> str:
    if not math.isfinite(found.high):
        return f"{found.value:{sign}.3f} [-]"
    return f"{found.value:{sign}.3f} [{found.low:{sign}.3f}, {found.high:{sign}.3f}]"


def _exponential(nats: _Estimated) -> _Estimated:
    """Return the perplexity, or the ratio of perplexities, of an estimate in nats."""
    value, low, high = (math.exp(each) if each < math.inf else each for each in (nats.value, nats.low, nats.high))
    return replace(nats, value=value, low=low, high=high)


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)
