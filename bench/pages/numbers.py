"""Numbers of result rows: what a cell of a table or a value in a sentence is computed from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean as average
from typing import Any

import numpy as np

from bench.common.results import RESULTS, Row, read_runs
from vllm_sparse_plugin.tools.eval.statistics import (
    Estimate,
    estimate_amount,
    estimate_excess,
    estimate_mean,
)

Rows = Sequence[Row]
Filter = Mapping[str, Any]
"""Columns and what they must be: a value, a set of values, or a function that tells."""
Number = Callable[[Rows, Rows], "Estimate | None"]
"""Computes a number from the rows of a line, and from all rows of its table; None if a row is missing."""

Column = str | Callable[[Row], Any]
"""A column's name, or a function of a row."""

ABOUT, MACHINE, FILE = "_about", "_machine", "_file"
"""Columns that `rows_of` adds: the first line of the file, `H100`, `H200` or `CPU`, and the stem of the file."""
AGAIN = "dense-again"
"""The setting of dense attention in other batches."""
_RATIO_RESAMPLES = 2000
_DECODED = 128
"""Tokens of a text that a served setting decodes."""


@cache
def _rows_of_file(path: Path) -> tuple[Row, ...]:
    machine = {"h100": "H100", "h200": "H200"}.get(path.relative_to(RESULTS).parts[0], "CPU")
    runs = read_runs(path)
    return tuple(
        {ABOUT: run.about, MACHINE: machine, FILE: path.stem, "model": run.about.get("model"), **row}
        for run in runs
        for row in run.rows
    )


def rows_of(paths: Sequence[Path]) -> list[Row]:
    """The rows of result files in order, each with its run."""
    return [row for path in paths for row in _rows_of_file(path)]


def column_of(row: Row, name: str | Callable[[Row], Any]) -> Any:
    """A column; `a.b` is a field of a column with fields, and a function computes one."""
    if callable(name):
        return name(row)
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def is_chosen(row: Row, where: Filter) -> bool:
    """Whether a row passes a filter."""
    for name, allowed in where.items():
        value = column_of(row, name)
        if callable(allowed):
            if not allowed(value):
                return False
        elif value not in allowed if isinstance(allowed, (set, tuple)) else value != allowed:
            return False
    return True


def chosen(rows: Rows, where: Filter) -> list[Row]:
    """The rows that pass a filter."""
    return [row for row in rows if is_chosen(row, where)]


def _values(rows: Rows, column: Column, where: Filter) -> list[float]:
    """The values of a column. If files repeat an item with a name, the last one counts."""
    found: dict[Any, float] = {}
    for place, row in enumerate(chosen(rows, where)):
        if (value := column_of(row, column)) is not None:
            item = (row["setting"], row["id"]) if "setting" in row and "id" in row else place
            found[item] = value
    return list(found.values())


def _plain(value: float, count: int = 1) -> Estimate:
    return Estimate(value, value, value, count)


def last(column: Column, **where: Any) -> Number:
    """A column of the last row: if files repeat a measurement, the later one counts."""

    def number(rows: Rows, _: Rows) -> Estimate | None:
        values = _values(rows, column, where)
        return _plain(values[-1]) if values else None

    return number


def mean(column: Column, **where: Any) -> Number:
    """The mean of a column, without an interval."""

    def number(rows: Rows, _: Rows) -> Estimate | None:
        values = _values(rows, column, where)
        return _plain(average(values), len(values)) if values else None

    return number


def total(column: Column, **where: Any) -> Number:
    """The sum of a column."""
    return lambda rows, _: _plain(sum(map(float, _values(rows, column, where))))


def score(column: Column = "score", **where: Any) -> Number:
    """The mean of scores from 0 to 1, with its interval."""

    def number(rows: Rows, _: Rows) -> Estimate | None:
        values = _values(rows, column, where)
        return estimate_mean(values) if values else None

    return number


def amount(column: Column, **where: Any) -> Number:
    """The mean of amounts of any sign, with its interval."""

    def number(rows: Rows, _: Rows) -> Estimate | None:
        values = _values(rows, column, where)
        return estimate_amount(values) if values else None

    return number


def ratio(top: Number, bottom: Number, less: float = 0.0) -> Number:
    """The ratio of two numbers, minus a constant."""

    def number(rows: Rows, every: Rows) -> Estimate | None:
        above, below = top(rows, every), bottom(rows, every)
        return None if above is None or below is None else _plain(above.value / below.value - less)

    return number


def beside(number: Number, same: Sequence[str] = (), **where: Any) -> Number:
    """A number of other rows of the table, such as those of the dense run, with the same values of some columns."""
    return lambda rows, every: number(chosen(every, where | {name: column_of(rows[0], name) for name in same}), every)


def tally(column: str, of: str, **where: Any) -> Number:
    """The sum of a column; its count is the sum of another."""

    def number(rows: Rows, _: Rows) -> Estimate | None:
        found = chosen(rows, where)
        return _plain(sum(row[column] for row in found), sum(row[of] for row in found)) if found else None

    return number


def recorded(column: str, **where: Any) -> Number:
    """An estimate that the last row holds."""

    def number(rows: Rows, _: Rows) -> Estimate | None:
        values = _values(rows, column, where)
        return Estimate(**values[-1]) if values else None  # type: ignore[arg-type]

    return number


def items(column: str, less: Filter | None = None, sign: int = 1, **where: Any) -> Number:
    """The mean over the values that rows list, each the mean over seeds; minus those of other rows of the table."""

    def number(rows: Rows, every: Rows) -> Estimate | None:
        found = _by_item(chosen(rows, where), column)
        if not found:
            return None
        base = _by_item(chosen(every, less), column) if less else dict.fromkeys(found, 0.0)
        return estimate_amount([sign * (value - base[item]) for item, value in found.items()])

    return number


def _by_item(rows: Rows, column: str) -> dict[Any, float]:
    values: dict[Any, list[float]] = {}
    for row in rows:
        group = tuple(str(row.get(name)) for name in ("context_tokens", "task", "text"))
        for place, value in enumerate(row[column]):
            values.setdefault((*group, place), []).append(value)
    return {item: average(found) for item, found in values.items()}


def changed(**where: Any) -> Number:
    """The share of next tokens that change beyond those that dense attention changes in other batches, by text."""

    def number(rows: Rows, every: Rows) -> Estimate | None:
        found = chosen(rows, where)
        if not found:
            return None
        noise = {
            (row[FILE], row["id"]): row["agreement"]
            for row in every
            if row.get("setting") in (AGAIN, "dense") and "agreement" in row
        }
        pairs = [(noise[row[FILE], row["id"]], row["agreement"]) for row in found]
        return estimate_excess([own for own, _ in pairs], [kept for _, kept in pairs], _DECODED)

    return number


def stayed(**where: Any) -> Number:
    """The share of next tokens that stay, over that of dense attention in float32, of the texts that have both."""
    return _over("agreement", "text", {"arm": "noise"}, where)


def answered(**where: Any) -> Number:
    """The score of answers over that of dense attention."""
    return _over("score", "id", {"setting": "dense"}, where)


def kept_answers(**where: Any) -> Number:
    """The same of a study in plain torch."""
    return _over("score", "name", {"arm": "dense"}, where)


def _over(column: str, item: str, base: Filter, where: Filter) -> Number:
    def number(rows: Rows, every: Rows) -> Estimate | None:
        below = {row[item]: row[column] for row in every if is_chosen(row, base) and column in row}
        found = {row[item]: row[column] for row in chosen(rows, where) if column in row and row[item] in below}
        return _estimate_ratio(list(found.values()), [below[name] for name in found]) if found else None

    return number


def _estimate_ratio(scores: Sequence[float], reference: Sequence[float]) -> Estimate:
    """Estimate the sum of paired scores over that of a reference, with a bootstrap over the items.

    Everything is NaN if the reference scores nothing.
    """
    pairs, count = np.array([scores, reference]), len(scores)
    if not pairs[1].any():
        return Estimate(math.nan, math.nan, math.nan, count)
    drawn = np.random.default_rng(0).integers(count, size=(_RATIO_RESAMPLES, count))
    sums = pairs[:, drawn].sum(axis=-1)
    ratios = sums[0][sums[1] > 0] / sums[1][sums[1] > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Estimate(float(pairs[0].sum() / pairs[1].sum()), float(low), float(high), count)


def lost(**where: Any) -> Number:
    """The share of next tokens that change in plain torch, beyond those of dense attention in float32."""

    def number(rows: Rows, every: Rows) -> Estimate | None:
        noise = {row["text"]: row["agreement"] for row in every if row["arm"] == "noise"}
        found = [row for row in chosen(rows, where) if row["text"] in noise]
        return estimate_excess([noise[row["text"]] for row in found], [row["agreement"] for row in found], _DECODED)

    return number
