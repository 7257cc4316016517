"""The console of the benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from bench.common.results import Row, read_runs

_WIDTH = 200


def open_console() -> Console:
    """Return a console that does not shorten tables without a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def print_tables(files: Sequence[Path], tables: Callable[[list[Row]], Iterable[Table]]) -> None:
    """Print the tables of the rows of all runs in result files."""
    console = open_console()
    for table in tables([row for path in files for run in read_runs(path) for row in run.rows]):
        console.print(table)


def end_with(failed: Sequence[str]) -> None:
    """Print the reasons of failures to standard error, and end with exit code 3 if there are any."""
    for sentence in failed:
        print(f"error: {sentence}", file=sys.stderr)
    if failed:
        raise typer.Exit(3)
