"""The console of the benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

_WIDTH = 200


def open_console() -> Console:
    """Return a console that does not shorten tables without a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print a line for each row; `-` where it lacks a column."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(row.get(name, "-")) for name in columns))
    open_console().print(table)


def print_beside(rows: Sequence[Mapping[str, Any]], lines: Sequence[str], column: str, value: str, form: str) -> None:
    """Print a line for each set of values of some columns, and the rows of a line beside each other.

    Args:
        rows: the measurements.
        lines: columns that name a line.
        column: names the cells of a line.
        value: the number of a cell, perhaps `a.b`. Each cell has the first cell's number divided by its own.
        form: the text of a cell, such as `{ms_per_token:.2f}`.
    """
    names = list(dict.fromkeys(str(row[column]) for row in rows))
    found: dict[tuple[str, ...], dict[str, tuple[float, str]]] = {}
    for row in rows:
        cells = found.setdefault(tuple(str(row[name]) for name in lines), {})
        number: Any = row
        for part in value.split("."):
            number = number.get(part) if isinstance(number, Mapping) else None
        if number is not None:
            cells[str(row[column])] = number, form.format(**row)
    table = Table(*lines, *names)
    for line, cells in found.items():
        first = cells.get(names[0], (0.0, ""))[0]
        texts = (f"{cells[name][1]}  {first / cells[name][0]:.2f}x" if name in cells else "-" for name in names)
        table.add_row(*line, *texts)
    open_console().print(table)


def end_with(failed: Sequence[str]) -> None:
    """Print the reasons of failures to standard error, and end with exit code 3 if there are any."""
    for sentence in failed:
        print(f"error: {sentence}", file=sys.stderr)
    if failed:
        raise typer.Exit(3)
