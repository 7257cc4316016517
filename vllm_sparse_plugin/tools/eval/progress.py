"""Shows the progress of long work: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_SECONDS = 15.0
"""Seconds between two lines without a terminal."""


class Advance(Protocol):
    """Notes that a part of the work is done."""

    def __call__(self, text: str | None = None, done: float = 1) -> None:
        """Take a text that replaces the title, and the size of the part, in the unit of the total."""
        ...


@contextmanager
def show_progress(console: Console, title: str, total: float | None = None) -> Iterator[Advance]:
    """Show progress until the end of the block: what is done, the time that it took, and the time that is left.

    Args:
        console: the output.
        title: the work, with the expected time if it is known before.
        total: amount of work, such as a number of steps or tokens, if known.

    Yields:
        A function to call after each part.
    """
    if not console.is_terminal:
        with _Lines(console, title, total) as lines:
            yield lines.advance
        return
    counted = () if total is None else (BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *counted, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=total is None) as bar:
        task = bar.add_task(title, total=total)

        def advance(text: str | None = None, done: float = 1) -> None:
            bar.update(task, advance=done, description=text)

        yield advance


class _Lines:
    """Prints the title, then progress from a thread, also while a part takes long."""

    def __init__(self, console: Console, title: str, total: float | None) -> None:
        self._console, self._text, self._total = console, title, total
        self._done = 0.0
        self._begin = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def advance(self, text: str | None = None, done: float = 1) -> None:
        self._text, self._done = text or self._text, self._done + done

    def __enter__(self) -> _Lines:
        self._print(self._text)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._ended.wait(LINE_SECONDS):
            self._print(f"{self._text}: {self._state()}")

    def _state(self) -> str:
        seconds = time.monotonic() - self._begin
        state = f"{seconds:.0f} s"
        if self._total and self._done:
            state = (
                f"{self._done / self._total:.0%}, {state}, {_minutes(seconds * (self._total / self._done - 1))} left"
            )
        return state

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _minutes(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds >= 60 else "less than a minute"
