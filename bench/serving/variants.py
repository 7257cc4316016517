"""Measures variants one after the other, each in a process of its own, which takes its settings as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import typer
from rich.console import Console
from rich.table import Table

from bench.common.children import run_python
from bench.common.engine import WrongBackendError


class VariantSettings(Protocol):
    """The settings of one variant's process, a pydantic model."""

    @property
    def variant(self) -> str:
        """Name of the variant."""

    def model_dump_json(self) -> str:
        """Returns the settings as its process takes them."""


def run_variant(command: str, settings: VariantSettings, seconds: float) -> list[str]:
    """Runs a variant in a process that is ended after some seconds; returns why it failed, if it did.

    Args:
        command: of `python -m bench.serving`.
        settings: its argument.
        seconds: how long it may take.
    """
    code = run_python("bench.serving", [command, settings.model_dump_json()], seconds)
    if code is None:
        return [f"{settings.variant} was not done by the deadline"]
    return [f"{settings.variant} ended with exit code {code}"] if code else []


@contextmanager
def exit_if_backend_is_wrong() -> Iterator[None]:
    """Ends a variant's process in one sentence, and with exit code 3, where vLLM chose another backend."""
    try:
        yield
    except WrongBackendError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(3) from None


def finish(console: Console, table: Table, failed: Sequence[str]) -> None:
    """Shows what was measured and what failed; exit code 3 if something did."""
    console.print(table)
    for sentence in failed:
        console.print(f"error: {sentence}")
    if failed:
        raise typer.Exit(3)
