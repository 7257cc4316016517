"""Result files: JSON lines, one for the run and then one for each measurement."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import open_output

Row = dict[str, Any]
"""The columns of one measurement."""

ROOT = Path(__file__).parents[2]
"""The checkout."""
RESULTS = ROOT / "results"
"""The committed result files, as MACHINE/STUDY/NAME.jsonl."""


@dataclass(frozen=True)
class Run:
    """One run and its measurements."""

    about: dict[str, Any]
    """The result of `describe_run`."""
    rows: list[Row]
    """The measurements, in order."""

    @property
    def day(self) -> str:
        """The day of the run, as `2026-11-21`."""
        return str(self.about["date"])[:10]

    @property
    def commit(self) -> str | None:
        """The measured commit, with a `+` if files differed from it; None if the run did not record it."""
        return self.about.get("commit")

    @property
    def machine(self) -> str:
        """The accelerator, or the processor of a machine without one."""
        hardware = self.about["hardware"]
        return str(hardware.get("gpu") or f"{hardware['processor']}, {hardware['cores']} cores")


@functools.cache
def _name_cut_line(path: Path, number: int) -> None:
    """Tell the user once that a line does not count."""
    about = f"line {number} of {str(path)!r} is cut, since the process that wrote it was ended; it does not count"
    print(f"results: {about}", file=sys.stderr)


def _read_lines(path: Path) -> list[Any]:
    """Read JSON lines but those that were cut.

    Raises:
        ValueError: a line that was not cut is not JSON, or the first one was.
    """
    lines: list[Any] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            lines += [json.loads(line)] if line else []
        except ValueError:
            if number == 1 or not line.startswith("{"):
                raise
            _name_cut_line(path, number)
    return lines


def read_runs(path: Path) -> list[Run]:
    """Read a result file with one or more runs. Lines that were cut do not count; stderr names them.

    Raises:
        ConfigurationError: the file cannot be read or is not a result file.
    """
    try:
        lines = _read_lines(path)
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


def read_run(path: Path) -> Run:
    """Read a result file of one run, or all measurements of a run that later runs continued.

    Raises:
        ConfigurationError: the file cannot be read or is not a result file.
    """
    runs = read_runs(path)
    return Run(runs[0].about, [row for run in runs for row in run.rows])


class ResultFile:
    """A result file that is open for writing, perhaps by several processes. Each line is flushed to disk."""

    def __init__(self, path: Path, about: Mapping[str, Any] | None = None, append: bool = False) -> None:
        """Opens a file.

        Args:
            path: of the file; its folder must exist.
            about: describes the run; None to continue the last run of the file.
            append: whether to add the run to an existing file.

        Raises:
            ConfigurationError: if the file cannot be written.
        """
        self._file = open_output(path, "output", "a" if append or about is None else "w")
        if about is not None:
            self.write(about)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes one line. It does not join one that a killed process cut."""
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            begin = "\n" if self._is_cut() else ""
            print(f"{begin}{json.dumps(line)}", file=self._file, flush=True)
        finally:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _is_cut(self) -> bool:
        """Whether the file ends in the middle of a line."""
        if not os.fstat(self._file.fileno()).st_size:
            return False
        with Path(self._file.name).open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and the 20th and 80th percentile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, _, high = statistics.quantiles(values, n=5, method="inclusive")
    return statistics.median(values), low, high
