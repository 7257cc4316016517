"""The console of the benchmarks."""

from __future__ import annotations

from rich.console import Console

_WIDTH = 200


def open_console() -> Console:
    """Return a console that does not shorten tables without a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)
