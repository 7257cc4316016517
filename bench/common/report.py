"""Result files: JSON lines, one for the run and then one for each measurement."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_sparse_plugin.errors import ConfigurationError

_WIDTH = 140


@dataclass(frozen=True)
class Run:
    """One run and what it measured."""

    about: dict[str, Any]
    """What `describe_run` says."""
    rows: list[dict[str, Any]]
    """The measurements, in order."""


def read_runs(path: Path) -> list[Run]:
    """Read a result file, or several of them one after the other.

    Raises:
        ConfigurationError: if the file cannot be read or is no result file.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, ValueError):
        lines = []
    if not lines or not all(isinstance(line, dict) for line in lines) or "versions" not in lines[0]:
        raise ConfigurationError(f"results: got {str(path)!r}, allowed: JSON lines that begin with those of a run")
    runs: list[Run] = []
    for line in lines:
        if "versions" in line:
            runs.append(Run(line, []))
        else:
            runs[-1].rows.append(line)
    return runs


def open_console() -> Console:
    """A console whose tables are not squeezed where there is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def spread(values: list[float]) -> tuple[float, float, float]:
    """The median and the 20th and 80th percentile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, _, high = statistics.quantiles(values, n=5, method="inclusive")
    return statistics.median(values), low, high
