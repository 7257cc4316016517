"""The table of a result file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.table import Table

from bench.common.results import Row, Run
from research.selection.evaluate import BUDGET
from vllm_sparse_plugin.tools.eval.statistics import estimate_amount, estimate_mean

_QUARTERS = "quarters"
"""The statistics that others are compared with."""
_COLUMNS = ("recall", "mass", "oracle_mass", "cosine")


def table(runs: Sequence[Run], by_layer: bool = False) -> Table:
    """Return means over texts and layers, with an interval of the mass over documents.

    Args:
        runs: results of one model.
        by_layer: whether each layer has separate rows.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    # A run of gates has rows of its training, too.
    for row in (row for run in runs for row in run.rows if "statistics" in row):
        key = (row["statistics"], row["page_size"], row["rule"], row["target"], *([row["layer"]] if by_layer else []))
        groups.setdefault(key, []).append(row)
    lines = Table("statistics", "page", "reads", *(["layer"] if by_layer else []), "bytes", title="Pages read, means")
    for column in (
        "recall", "mass", "mass, 95 %", "minus quarters, 95 %", "oracle mass", "cosine", "pages", "below by .05"
    ):  # fmt: skip
        lines.add_column(column, justify="right")
    for (name, size, rule, target, *layer), rows in groups.items():
        recall, mass, oracle, cosine = (_mean([row[column] for row in rows]) for column in _COLUMNS)
        lines.add_row(
            str(name), str(size), f"{target} tokens" if rule == BUDGET else f"coverage {target}", *map(str, layer),
            str(rows[0]["record_bytes"]), f"{recall:.3f}", f"{mass:.3f}", _interval(_by_document(rows).values()),
            _minus(rows, groups.get((_QUARTERS, size, rule, target, *layer), [])), f"{oracle:.3f}",
            f"{cosine:.3f}", f"{_mean([row['pages'] for row in rows]):.1f}",
            f"{_mean([row['below'] for row in rows]):.1%}" if "below" in rows[0] else "",
        )  # fmt: skip
    return lines


def _interval(values: Iterable[float]) -> str:
    estimate = estimate_mean(list(values))
    return f"{estimate.low:.3f}-{estimate.high:.3f}" if math.isfinite(estimate.low) else "-"


def _minus(rows: Sequence[Row], others: Sequence[Row]) -> str:
    """Return how much more weight `rows` hold than `others` of the same documents: "0.010 to 0.020"."""
    first, second = _by_document(rows), _by_document(others)
    if first.keys() != second.keys() or first == second:
        return "-"
    estimate = estimate_amount([first[name] - second[name] for name in first])
    return f"{estimate.low:+.3f} to {estimate.high:+.3f}" if math.isfinite(estimate.low) else "-"


def _by_document(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean of the mass by document."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["document"], []).append(row["mass"])
    return {name: _mean(values) for name, values in found.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
