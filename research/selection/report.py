"""The table of a result file."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from bench.common.results import Row, Run
from research.selection.evaluate import BUDGET
from vllm_sparse_plugin.tools.eval.statistics import estimate_mean

_COLUMNS = ("recall", "mass", "oracle_mass", "cosine")


def table(runs: Sequence[Run], by_layer: bool = False) -> Table:
    """Return means over texts and layers, with an interval of the mass over documents.

    Args:
        runs: results of one model.
        by_layer: whether each layer has separate rows.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in (row for run in runs for row in run.rows):
        key = (row["statistics"], row["page_size"], row["rule"], row["target"], *([row["layer"]] if by_layer else []))
        groups.setdefault(key, []).append(row)
    lines = Table("statistics", "page", "reads", *(["layer"] if by_layer else []), "bytes", title="Pages read, means")
    for column in ("recall", "mass", "mass, 95 %", "oracle mass", "cosine", "pages", "below by .05"):
        lines.add_column(column, justify="right")
    for (name, size, rule, target, *layer), rows in groups.items():
        recall, mass, oracle, cosine = (_mean([row[column] for row in rows]) for column in _COLUMNS)
        lines.add_row(
            str(name), str(size), f"{target} tokens" if rule == BUDGET else f"coverage {target}", *map(str, layer),
            str(rows[0]["record_bytes"]), f"{recall:.3f}", f"{mass:.3f}", _interval(rows), f"{oracle:.3f}",
            f"{cosine:.3f}", f"{_mean([row['pages'] for row in rows]):.1f}",
            f"{_mean([row['below'] for row in rows]):.1%}" if "below" in rows[0] else "",
        )  # fmt: skip
    return lines


def _interval(rows: Sequence[Row]) -> str:
    of_documents: dict[str, list[float]] = {}
    for row in rows:
        of_documents.setdefault(row["document"], []).append(row["mass"])
    estimate = estimate_mean([_mean(values) for values in of_documents.values()])
    return f"{estimate.low:.3f}-{estimate.high:.3f}" if math.isfinite(estimate.low) else "-"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
