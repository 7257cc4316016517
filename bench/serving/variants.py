"""Measures variants one after the other, each in a separate process that takes its settings as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer
from pydantic import BaseModel, ConfigDict
from rich.table import Table

from bench.common.children import run_python
from bench.common.console import open_console
from bench.common.engine import Variant, exits_for_wrong_backend
from bench.common.models import Model, open_model
from bench.common.options import GridRow
from bench.common.results import ResultFile, Row, read_run
from vllm_sparse_plugin.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm import LLM


Generate = Callable[[list[list[int]], int], list[int]]
"""Generates that many tokens for each prompt and returns the number of cached tokens of each."""


class EngineSettings(BaseModel):
    """The input of every process with an engine."""

    model_config = ConfigDict(frozen=True)

    model: str
    """A shape or the folder of a model."""
    repeats: int
    gpu_memory_utilization: float | None
    output: str
    """JSON lines file to append to."""


class BackendSettings(EngineSettings):
    """The same with an attention backend and its configuration."""

    variant: str
    additional_config: str | None


class VariantSettings(Protocol):
    """Settings of one variant's process, a pydantic model."""

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
        """Returns the settings as JSON for the process."""


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
    with ResultFile(output, about):
        print(forecast, end="\n" if forecast else "", flush=True)
    failed = [sentence for settings in all_settings for sentence in _run_variant(command, settings, seconds())]
    console = open_console()
    console.print(table(read_run(output).rows))
    for sentence in failed:
        console.print(f"error: {sentence}")
    if failed:
        raise typer.Exit(3)


def _run_variant(command: str, settings: VariantSettings, seconds: float) -> list[str]:
    """Runs a variant in a process with a time limit; returns the reason of a failure, or nothing."""
    code = run_python("bench.serving", [command, settings.model_dump_json()], seconds)
    if code is None:
        return [f"{settings.variant} was not done by the deadline"]
    return [f"{settings.variant} ended with exit code {code}"] if code else []


@contextmanager
def open_variant(settings: VariantSettings) -> Iterator[tuple[Model, ResultFile]]:
    """Yields the model and the result file of a variant's process."""
    with (
        exits_for_wrong_backend(),
        open_model(settings.model) as model,
        ResultFile(Path(settings.output)) as file,
    ):
        yield model, file


def check_batches(row: GridRow, max_num_seqs: int) -> None:
    """Raises ConfigurationError for batches that exceed an engine's limit."""
    largest = max(batch or 1 for batch in row.batches)
    if largest > max_num_seqs:
        raise ConfigurationError(f"grid: got a batch of {largest}, allowed: at most max_num_seqs = {max_num_seqs}")


def per_token(milliseconds: Sequence[float]) -> Row:
    """The columns of times per token: the median, the least and the most."""
    found = {"": statistics.median(milliseconds), "_min": min(milliseconds), "_max": max(milliseconds)}
    return {f"ms_per_token{name}": round(value, 4) for name, value in found.items()}


def time_tokens(seconds: Callable[[int], float], new_tokens: int, repeats: int) -> Row:
    """The columns of the time of one token: the difference between 1 and 1 + `new_tokens` tokens, divided by it.

    Args:
        seconds: generates that many tokens for each request of a batch; returns how long it took.
        new_tokens: tokens per measured time.
        repeats: measurements.
    """
    times = [(seconds(1 + new_tokens) - seconds(1)) / new_tokens * 1e3 for _ in range(repeats)]
    return {**per_token(times), "repeats": repeats, "new_tokens": new_tokens}


def generator(llm: LLM, only: int | None = None) -> Generate:
    """Returns a function that generates a given number of likeliest tokens in an engine, or of one token alone."""
    from vllm import SamplingParams, TokensPrompt

    def generate(prompts: list[list[int]], tokens: int) -> list[int]:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
            allowed_token_ids=None if only is None else [only],
        )  # fmt: skip
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return [output.num_cached_tokens or 0 for output in llm.generate(asked, sampling, use_tqdm=False)]

    return generate


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
        "weights": "drawn" if model.drawn_weights else "checkpoint",
    }
