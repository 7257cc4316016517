"""Shows the progress of long work: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

LINE_SECONDS = 15.0
"""Seconds between two lines without a terminal."""


@contextmanager
def show_progress(console: Console, title: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show progress until the end of the block.

    Args:
        console: the output.
        title: the work.
        total: number of steps, if known.

    Yields:
        A function to call after each step. Its text replaces the title.
    """
    if not console.is_terminal:
        with _Lines(console, title, total) as lines:
            yield lines.advance
        return
    counted = () if total is None else (BarColumn(), MofNCompleteColumn())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *counted, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=total is None) as bar:
        task = bar.add_task(title, total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


class _Lines:
    """Prints the title, then progress from a thread."""

    def __init__(self, console: Console, title: str, total: int | None) -> None:
        self._console, self._text, self._total = console, title, total
        self._done = 0
        self._begin = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def advance(self, text: str) -> None:
        self._text, self._done = text, self._done + 1

    def __enter__(self) -> _Lines:
        self._print(self._text)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._ended.wait(LINE_SECONDS):
            steps = "" if self._total is None else f"{self._done} of {self._total}, "
            self._print(f"{self._text}: {steps}{time.monotonic() - self._begin:.0f} s")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
