"""Where the benchmarks print."""

from __future__ import annotations

from rich.console import Console

_WIDTH = 200


def open_console() -> Console:
    """A console whose tables are not squeezed where there is no terminal: a log has no width of its own."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)
