"""Numbers of result rows, from expressions of the specifications.

An expression is a function, a column and a filter: `mean kv_read_share text=essay_7700`. `last ms / last rival - 1`
divides and subtracts. A filter is a column and patterns of its value: `arm=hard|soft` or `variant=unique*`; `!dense`
excludes. `beside=batch,context` takes the rows of the whole table that have the batch and context of the line.
A column `a.b` is a field of a field, `a.0` an element, and `a.*` all of them.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import mean as average
from typing import Any

import numpy as np

from bench.common.results import RESULTS, Row, read_runs
from bench.pages.labels import ABOUT, AGAIN, FILE, MACHINE, Rows, budget_of
from vllm_sparse_plugin.tools.eval.statistics import (
    Estimate,
    estimate_amount,
    estimate_excess,
    estimate_mean,
)

Filter = Mapping[str, str]
"""Patterns by column."""
Found = Estimate | float | None
"""A number; None if a row is missing."""
_RATIO_RESAMPLES = 2000
_DECODED = 128
"""Tokens of a text that a served setting decodes."""


@cache
def _rows_of_file(path: Path) -> tuple[Row, ...]:
    machine = {"h100": "H100", "h200": "H200"}.get(path.relative_to(RESULTS).parts[0], "CPU")
    return tuple(
        {ABOUT: run.about, MACHINE: machine, FILE: path.stem, "model": run.about.get("model"), **row}
        for run in read_runs(path)
        for row in run.rows
    )


def rows_of(paths: Sequence[Path]) -> list[Row]:
    """The rows of result files in order, each with its run."""
    return [row for path in paths for row in _rows_of_file(path)]


def _fields(value: Any, parts: Sequence[str]) -> Iterator[Any]:
    if not parts:
        yield value
    elif value is not None and parts[0] == "*":
        for each in value.values() if isinstance(value, dict) else value:
            yield from _fields(each, parts[1:])
    elif isinstance(value, list):
        yield from _fields(value[int(parts[0])], parts[1:])
    elif isinstance(value, dict):
        yield from _fields(value.get(parts[0]), parts[1:])


def column_of(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column; None if the row has none."""
    return next(_fields(row, name.split(".")), None)


def parse_filter(words: Iterable[str]) -> dict[str, str]:
    """The filter of `COLUMN=PATTERN|PATTERN` words."""
    return {name: pattern for name, _, pattern in (word.partition("=") for word in words)}


def chosen(rows: Rows, where: Filter) -> list[Row]:
    """The rows that pass a filter."""
    return [row for row in rows if all(_matches(column_of(row, name), pattern) for name, pattern in where.items())]


def _matches(value: Any, pattern: str) -> bool:
    patterns = pattern.split("|")
    wanted = [each for each in patterns if not each.startswith("!")]
    return not any(fnmatchcase(str(value), each[1:]) for each in patterns if each.startswith("!")) and (
        not wanted or any(fnmatchcase(str(value), each) for each in wanted)
    )


def evaluate(expression: str, rows: Rows, every: Rows) -> Estimate | None:
    """The number of an expression, from the rows of a line and all rows of its table; None if a row is missing."""
    terms = [
        [_evaluate(factor, rows, every) for factor in _split(term, "/")]
        for term in _split(shlex.split(expression), "-")
    ]
    if len(terms) == len(terms[0]) == 1:
        return terms[0][0]
    total = 0.0
    for place, factors in enumerate(terms):
        known = [each.value for each in factors if each is not None]
        if len(known) < len(factors):
            return None
        value = known[0]
        for divisor in known[1:]:
            value /= divisor
        total += -value if place else value
    return _plain(total)


def _split(words: Sequence[str], sign: str) -> Iterator[Sequence[str]]:
    while sign in words:
        place = words.index(sign)
        yield words[:place]
        words = words[place + 1 :]
    yield words


def _evaluate(words: Sequence[str], rows: Rows, every: Rows) -> Estimate | None:
    name, *rest = words
    if name not in FUNCTIONS:
        return _plain(float(name))
    where = parse_filter(word for word in rest if "=" in word)
    same = where.pop("beside", None)
    if same is not None:
        where |= {column: str(column_of(rows[0], column)) for column in filter(None, same.split(","))}
        rows = every
    found = FUNCTIONS[name](chosen(rows, where), every, *(word for word in rest if "=" not in word))
    return found if found is None or isinstance(found, Estimate) else _plain(found)


def _plain(value: float) -> Estimate:
    return Estimate(value, value, value, 1)


def _values(rows: Rows, column: str) -> list[Any]:
    """The values of a column. If files repeat an item with a name, the last one counts."""
    found: dict[Any, list[Any]] = {}
    for place, row in enumerate(rows):
        values = [value for value in _fields(row, column.split(".")) if value is not None]
        if values:
            found[(row["setting"], row["id"]) if "setting" in row and "id" in row else place] = values
    return [value for values in found.values() for value in values]


def _last(rows: Rows, _: Rows, column: str) -> Found:
    """A column of the last row: if files repeat a measurement, the later one counts."""
    return next(reversed(_values(rows, column)), None)


def _recorded(rows: Rows, _: Rows, column: str) -> Found:
    """An estimate that the last row holds."""
    values = _values(rows, column)
    return Estimate(**values[-1]) if values else None


def _reduced(reduce: Callable[[list[Any]], Found]) -> Callable[[Rows, Rows, str], Found]:
    return lambda rows, _, column: reduce(values) if (values := _values(rows, column)) else None


def _total(rows: Rows, _: Rows, column: str) -> Found:
    return float(sum(_values(rows, column))) if rows else None


def _count(rows: Rows, _: Rows, column: str | None = None) -> Found:
    """The rows, or the values of a column that are not empty."""
    return len(rows) if column is None else sum(map(bool, _values(rows, column)))


def _size(rows: Rows, _: Rows, column: str) -> Found:
    """The number of elements in the last row."""
    return len(_values(rows, column)[-1])


def _weighted(rows: Rows, _: Rows, column: str) -> Found:
    """The mean over the queries of all rows."""
    return float(sum(row["queries"] * row[column] for row in rows) / sum(row["queries"] for row in rows))


def _time(kind: str) -> Callable[[Rows, Rows, str], Found]:
    """The median microseconds of a provider, in the last row."""
    return lambda rows, every, provider: _last(chosen(rows, {"provider": provider}), every, f"{kind}.median_us")


def _budget(rows: Rows, _: Rows) -> Found:
    """The budget of the last row, in tokens."""
    tokens = [budget_of(row).removesuffix(" tokens").replace(",", "") for row in rows]
    return next((int(each) for each in reversed(tokens) if each), None)


def _ms(rows: Rows, _: Rows) -> Found:
    """Milliseconds per token of the last row, with the least and the most of its repeats."""
    found = [row for row in rows if "ms_per_token" in row]
    if not found:
        return None
    row: dict[str, Any] = {"repeats": 1, **found[-1]}
    low, high = (
        row.get(f"ms_per_token_{end}", row.get(f"ms_per_token_{share}", row["ms_per_token"]))
        for end, share in (("min", "p20"), ("max", "p80"))
    )
    return Estimate(row["ms_per_token"], low, high, row["repeats"])


def _by_layer(reduce: Callable[[list[float]], float]) -> Callable[[Rows, Rows, str], Found]:
    """Reduces the means of each layer."""
    return lambda rows, _, column: reduce(
        [average(layer) for layer in zip(*(row[column] for row in rows if column in row), strict=True)]
    )


def _items(rows: Rows, _: Rows, column: str) -> Found:
    """The mean over the values that rows list, each the mean over seeds."""
    found = _by_item(rows, column)
    return estimate_amount(list(found.values())) if found else None


def _risen(rows: Rows, every: Rows, column: str) -> Found:
    """The same minus the values of dense attention before training."""
    found = _by_item(rows, column)
    before = _by_item(chosen(every, {"arm": "before", "part": "text", "budget_tokens": "None"}), column)
    return estimate_amount([value - before[item] for item, value in found.items()]) if found else None


def _by_item(rows: Rows, column: str) -> dict[Any, float]:
    values: dict[Any, list[float]] = {}
    for row in rows:
        group = tuple(str(row.get(name)) for name in ("context_tokens", "task", "text"))
        for place, value in enumerate(row[column]):
            values.setdefault((*group, place), []).append(value)
    return {item: average(found) for item, found in values.items()}


def _excess(items: Sequence[str], base: Filter) -> Callable[[Rows, Rows], Found]:
    """The share of next tokens that change beyond those that other rows change, by the columns that name a text."""

    def number(rows: Rows, every: Rows) -> Found:
        def agreements(rows: Rows) -> dict[Any, float]:
            return {tuple(row[name] for name in items): row["agreement"] for row in rows if "agreement" in row}

        noise, found = agreements(chosen(every, base)), agreements(rows)
        known = [item for item in found if item in noise]
        pairs = [noise[item] for item in known], [found[item] for item in known]
        return estimate_excess(*pairs, _DECODED) if known else None

    return number


def _over(column: str, item: str, base: Filter) -> Callable[[Rows, Rows], Found]:
    """The ratio to dense attention, of the items that both have."""

    def number(rows: Rows, every: Rows) -> Found:
        below = {row[item]: row[column] for row in chosen(every, base) if column in row}
        found = {row[item]: row[column] for row in rows if column in row and row[item] in below}
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


FUNCTIONS: dict[str, Callable[..., Found]] = {
    "last": _last, "recorded": _recorded, "total": _total, "count": _count, "size": _size, "budget": _budget,
    "least": _reduced(min), "most": _reduced(max), "mean": _reduced(average), "score": _reduced(estimate_mean),
    "perplexity": _reduced(lambda nats: math.exp(average(nats))), "weighted": _weighted, "ms": _ms,
    "warm": _time("warm"), "cold": _time("cold"),
    "least_layer": _by_layer(min), "most_layer": _by_layer(max), "items": _items, "risen": _risen,
    # Beyond the changes of dense attention in other batches, or in float32.
    "changed": _excess((FILE, "id"), {"setting": f"{AGAIN}|dense"}), "lost": _excess(("text",), {"arm": "noise"}),
    # Next tokens that stay, over those of dense attention in float32.
    "stayed": _over("agreement", "text", {"arm": "noise"}),
    # Scores of answers over those of dense attention, of served settings and in plain torch.
    "answered": _over("score", "id", {"setting": "dense"}),
    "kept": _over("score", "name", {"arm": "dense"}),
}  # fmt: skip
"""Functions of expressions: each takes the rows that pass the filter, all rows of the table, and columns."""
