"""The console of the benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from rich.console import Console

_WIDTH = 200


def open_console() -> Console:
    """Return a console that does not shorten tables without a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def end_with(failed: Sequence[str]) -> None:
    """Print the reasons of failures to standard error, and end with exit code 3 if there are any."""
    for sentence in failed:
        print(f"error: {sentence}", file=sys.stderr)
    if failed:
        raise typer.Exit(3)
