"""Measures variants one after the other, each in a process of its own, which takes its settings as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import typer
from rich.console import Console
from rich.table import Table

from bench.common.children import run_python
from bench.common.engine import WrongBackendError
from bench.common.models import Model, open_model
from bench.common.options import GridRow
from bench.common.results import ResultFile, Row, spread
from vllm_sparse_plugin.errors import ConfigurationError

DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Decode graphs without the wait for torch.compile, which leaves attention alone."""


class VariantSettings(Protocol):
    """The settings of one variant's process, a pydantic model."""

    @property
    def variant(self) -> str:
        """Name of the variant."""

    @property
    def model(self) -> str:
        """A shape or the folder of a model."""

    @property
    def output(self) -> str:
        """JSON lines file to append to."""

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
def open_variant(settings: VariantSettings) -> Iterator[tuple[Model, ResultFile]]:
    """Yields the model and the result file of a variant's process, which ends in one sentence, and with exit code 3,
    where vLLM chose another backend."""
    try:
        with open_model(settings.model) as model, ResultFile(Path(settings.output)) as file:
            yield model, file
    except WrongBackendError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(3) from None


def check_batches(row: GridRow, max_num_seqs: int) -> None:
    """Raises ConfigurationError for batches of a context that an engine does not take."""
    largest = max(batch or 1 for batch in row.batches)
    if largest > max_num_seqs:
        raise ConfigurationError(f"grid: got a batch of {largest}, allowed: at most max_num_seqs = {max_num_seqs}")


def per_token(milliseconds: Sequence[float]) -> Row:
    """The columns of times per token: their median, and what lies around it."""
    names = ("ms_per_token", "ms_per_token_p20", "ms_per_token_p80")
    return {name: round(value, 4) for name, value in zip(names, spread(milliseconds), strict=True)}


def finish(console: Console, table: Table, failed: Sequence[str]) -> None:
    """Shows what was measured and what failed; exit code 3 if something did."""
    console.print(table)
    for sentence in failed:
        console.print(f"error: {sentence}")
    if failed:
        raise typer.Exit(3)
