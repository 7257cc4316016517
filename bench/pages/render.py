"""The renderer: specifications of tables, and the one function that makes a block of any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common.pages import Block, table
from bench.common.results import RESULTS
from bench.pages.labels import describe
from bench.pages.numbers import Filter, Number, Rows, chosen, column_of, rows_of

INTERVAL = "{v:.2f} [{low:.2f}, {high:.2f}]"
PERCENT = "{v:.1%} [{low:.1%}, {high:.1%}]"
Name = Callable[[Mapping[str, Any]], str | None]
"""Names the line of a row; None if the row has no line, as a dense row that others are compared with."""


@dataclass(frozen=True)
class Cell:
    """A number and how it is written."""

    number: Number
    form: str = "{v:.2f}"
    """A format of `v`, the ends `low` and `high` of its interval, and the count `n`."""
    missing: str = "-"

    def text(self, rows: Rows, every: Rows) -> str:
        """The number of some rows of a table."""
        found = self.number(rows, every)
        return (
            self.missing
            if found is None
            else self.form.format(v=found.value, low=found.low, high=found.high, n=found.count)
        )


@dataclass(frozen=True)
class Table:
    """One line for each name that rows have."""

    files: Sequence[str]
    """Patterns below `results/`, without `.jsonl`."""
    lines: Mapping[str, Name]
    """How a line is named, by heading."""
    columns: Mapping[str, Cell | Sequence[Cell]]
    """Cells by heading; several cells are joined by a space."""
    where: Filter = field(default_factory=dict)
    order: Callable[[tuple[str, ...]], Any] | None = None
    """Sorts lines by their names; by default lines are in the order of the files."""


@dataclass(frozen=True)
class Line:
    """A line of a list: texts and the numbers in them, from files of its own."""

    files: Sequence[str]
    cells: Sequence[str]
    """Texts with a format of each number, such as `{gain.value:.1f}x`. `{setting}` is what was run, in words."""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    where: Filter = field(default_factory=dict)


@dataclass(frozen=True)
class Lines:
    """A list of unlike lines."""

    headings: Sequence[str]
    lines: Sequence[Line]


Spec = Table | Lines | Callable[[], Block]
"""A block: data, or a function for what does not come from result files."""


def paths_of(files: Sequence[str]) -> list[Path]:
    """The result files of patterns, in their order."""
    return [path for pattern in files for path in sorted(RESULTS.glob(f"{pattern}.jsonl"))]


def render(spec: Spec) -> Block:
    """The block of a specification."""
    if isinstance(spec, Table):
        return _table(spec)
    if isinstance(spec, Lines):
        sources = list(dict.fromkeys(path for line in spec.lines for path in paths_of(line.files)))
        return Block(table(spec.headings, map(line_text, spec.lines)), sources)
    return spec()


def line_text(line: Line) -> list[str]:
    """The cells of a line of a list."""
    rows = chosen(rows_of(paths_of(line.files)), line.where)
    found = {name: number(rows, rows) for name, number in line.numbers.items()}
    setting = describe(rows) if rows else ""
    return [cell.format(setting=setting, **found) for cell in line.cells]


def _table(spec: Table) -> Block:
    paths = paths_of(spec.files)
    every = chosen(rows_of(paths), spec.where)
    groups: dict[tuple[str, ...], list[Any]] = {}
    for row in every:
        found = [name(row) for name in spec.lines.values()]
        if None not in found:
            groups.setdefault(tuple(map(str, found)), []).append(row)
    lines = []
    for names in sorted(groups, key=spec.order) if spec.order else groups:
        cells = (_cells(column, groups[names], every) for column in spec.columns.values())
        lines.append([*names, *cells])
    return Block(table([*spec.lines, *spec.columns], lines), paths)


def _cells(column: Cell | Sequence[Cell], rows: Rows, every: Rows) -> str:
    cells = [column] if isinstance(column, Cell) else column
    texts = [cell.text(rows, every) for cell in cells]
    return cells[0].missing if texts[0] == cells[0].missing else " ".join(filter(None, texts))


def named(column: str, names: Mapping[Any, str] | None = None, form: str = "{}") -> Name:
    """Names lines by a column: by the names that are given, and no others, or in a format."""

    def name(row: Mapping[str, Any]) -> str | None:
        value = column_of(dict(row), column)
        if names is not None:
            return names.get(value)
        return None if value is None else form.format(value)

    return name
