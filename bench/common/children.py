"""Runs commands as child processes, which end with this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from bench.common.results import ROOT
from vllm_sparse_plugin.tools.server import group_of


def python_path() -> str:
    """PYTHONPATH of a child process that imports this package from any folder."""
    return os.pathsep.join([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def child_environment() -> dict[str, str]:
    """The environment of a child process that imports this package and asks local servers."""
    return {
        "VLLM_LOGGING_LEVEL": "WARNING",
        **os.environ,
        "PYTHONPATH": python_path(),
        "NO_PROXY": "127.0.0.1",  # a proxy of the environment must not see local requests
        "no_proxy": "127.0.0.1",
    }


def run_python(module: str, arguments: list[str], seconds: float, log: Path | None = None) -> int | None:
    """Run `python -m module arguments`. The output goes to `log`, or to the output of this process.

    Returns:
        The exit code, or None if the child was ended after `seconds`.
    """
    with (
        (log or Path(os.devnull)).open("wb") as file,
        group_of(
            [sys.executable, "-m", module, *arguments], stdout=file if log else None,
            stderr=subprocess.STDOUT if log else None, env=child_environment(),
        ) as process,
    ):  # fmt: skip
        try:
            return process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return None


def unwind_on_termination() -> None:
    """Let SIGTERM end this process like an exit, so no server outlives the command."""

    def unwind(*_: object) -> None:
        # A second signal must not interrupt the clean-up.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, unwind)
