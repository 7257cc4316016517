"""Measures variants one after the other, each in a separate process that takes its settings as JSON."""

from __future__ import annotations

import json
import statistics
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from bench.common.children import run_python
from bench.common.console import end_with
from bench.common.engine import Variant
from bench.common.models import Model, open_model
from bench.common.results import ResultFile, Row, read_run
from vllm_sparse_plugin.tools.provenance import describe_run

COMMAND = "measure"
"""The hidden command of the processes."""
_SHOWN = ("load", "measurement", "context_tokens", "ms_per_token", "seconds_median", "skipped")
"""Columns that are printed at once."""


class VariantSettings(BaseModel):
    """The input of the process of one variant."""

    model_config = ConfigDict(frozen=True)

    model: str
    """A shape or the folder of a model."""
    variant: str
    additional_config: str | None
    engine_args: dict[str, Any]
    """Arguments of `vllm.LLM`, above those of the measurement."""
    repeats: int

    @property
    def label(self) -> str:
        """The name in messages."""
        return self.variant

    @abstractmethod
    def measure(self, model: Model) -> Iterator[Row]:
        """Measure in this process; yield the columns of each measurement."""


def measure_variants(
    all_settings: Sequence[VariantSettings],
    model: Model,
    commit: str | None,
    output: Path,
    end: float,
    show: Callable[[list[Row]], None],
) -> None:
    """Runs variants one after the other and shows their measurements; exit code 3 if one fails.

    Args:
        all_settings: of each variant; they say how it is measured.
        model: that is measured.
        commit: recorded if the checkout has no history.
        output: the result file.
        end: latest end on `time.monotonic`.
        show: prints all rows.
    """
    failed = []
    with ResultFile(output, describe_run(model.folder, commit)):
        pass
    for settings in all_settings:
        kind = f"{type(settings).__module__}:{type(settings).__name__}"
        arguments = [COMMAND, kind, settings.model_dump_json(), str(output.absolute())]
        code = run_python("bench.serving", arguments, end - time.monotonic())
        if code != 0:
            ending = "was not done by the deadline" if code is None else f"ended with exit code {code}"
            failed.append(f"{settings.label} {ending}")
    show(read_run(output).rows)
    end_with(failed)


def measure_here(settings: VariantSettings, output: Path) -> None:
    """Measures a variant in this process and appends its rows to the result file."""
    with open_model(settings.model) as model, ResultFile(output) as file:
        for row in settings.measure(model):
            file.write(row)
            shown = (f"{name} {row[name]}" for name in _SHOWN if name in row)
            print(f"{settings.label}: {', '.join(shown)}", flush=True)


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


def shared_settings(variant: Variant, model: Model, additional_config: str | None) -> Mapping[str, Any]:
    """The fields of `VariantSettings` that say what is measured."""
    return {
        "model": model.folder.name if model.drawn_weights else str(model.folder),
        "variant": variant.name,
        "additional_config": variant.additional_config(additional_config),
    }
