"""Measures variants one after the other, each in a separate process that takes its settings as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, ConfigDict
from rich.table import Table

from bench.common.children import run_python
from bench.common.console import open_console
from bench.common.engine import Variant, exits_for_wrong_backend
from bench.common.models import Model, open_model
from bench.common.results import ResultFile, Row, read_run


class VariantSettings(BaseModel):
    """The input of the process of one variant."""

    model_config = ConfigDict(frozen=True)

    model: str
    """A shape or the folder of a model."""
    variant: str
    additional_config: str | None
    repeats: int
    gpu_memory_utilization: float | None
    """None for vLLM's default."""
    output: str
    """JSON lines file to append to."""

    @property
    def label(self) -> str:
        """The name in messages."""
        return self.variant


def measure_variants(
    command: str,
    all_settings: Sequence[VariantSettings],
    about: Mapping[str, Any],
    output: Path,
    seconds: Callable[[], float],
    table: Callable[[list[Row]], Table],
    forecast: str = "",
) -> None:
    """Runs variants one after the other and shows their measurements; exit code 3 if one fails.

    Args:
        command: of `python -m bench.serving`; measures one variant.
        all_settings: its argument for each variant.
        about: describes the run.
        output: the result file.
        seconds: returns the time limit of the next variant.
        table: makes the table of all rows.
        forecast: a line about the expected time, to print at first.
    """
    failed = []
    with ResultFile(output, about):
        print(forecast, end="\n" if forecast else "", flush=True)
    for settings in all_settings:
        code = run_python("bench.serving", [command, settings.model_dump_json()], seconds())
        if code != 0:
            ending = "was not done by the deadline" if code is None else f"ended with exit code {code}"
            failed.append(f"{settings.label} {ending}")
    console = open_console()
    console.print(table(read_run(output).rows))
    for sentence in failed:
        console.print(f"error: {sentence}")
    if failed:
        raise typer.Exit(3)


@contextmanager
def open_variant(settings: VariantSettings) -> Iterator[tuple[Model, ResultFile]]:
    """Yields the model and the result file of a variant's process."""
    with (
        exits_for_wrong_backend(),
        open_model(settings.model) as model,
        ResultFile(Path(settings.output)) as file,
    ):
        yield model, file


def per_token(milliseconds: Sequence[float]) -> Row:
    """The columns of times per token: the median, the least and the most."""
    found = {"": statistics.median(milliseconds), "_min": min(milliseconds), "_max": max(milliseconds)}
    return {f"ms_per_token{name}": round(value, 4) for name, value in found.items()}


def variant_columns(variant: Variant, backend: str, additional_config: str | None, model: Model) -> Row:
    """The columns that identify a measurement.

    Args:
        variant: the requested variant.
        backend: the backend that vLLM uses.
        additional_config: JSON for this plugin's backends.
        model: the model.
    """
    return {
        "variant": variant.name,
        "attention_backend": backend,
        "kv_cache_dtype": variant.kv_cache_dtype,
        "additional_config": json.loads(variant.additional_config(additional_config) or "null"),
        "budget_tokens": variant.budget_tokens(additional_config),
        "weights": "drawn" if model.drawn_weights else "checkpoint",
    }
