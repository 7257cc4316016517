"""Shows the progress of long work: a bar on a terminal, otherwise a line at most every few seconds."""

from __future__ import annotations

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

from vllm_sparse_plugin.tools.endings import say

LINE_SECONDS = 15.0
"""Least seconds between two lines without a terminal."""


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
    if console.is_terminal:
        counted = () if total is None else (BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        columns = (SpinnerColumn(), TextColumn("{task.description}"), *counted, TimeElapsedColumn())
        with Progress(*columns, console=console, transient=total is None) as bar:
            task = bar.add_task(title, total=total)
            yield lambda text=None, done=1: bar.update(task, advance=done, description=text)
        return
    begin = shown = time.monotonic()
    finished = 0.0

    def advance(text: str | None = None, done: float = 1) -> None:
        nonlocal shown, finished
        finished, now = finished + done, time.monotonic()
        if now - shown >= LINE_SECONDS:
            shown, share = now, f"{finished / total:.0%}, " if total else ""
            say(console, f"{text or title}: {share}{now - begin:.0f} s")

    say(console, title)
    yield advance
