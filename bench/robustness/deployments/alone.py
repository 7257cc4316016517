"""Runs each deployment in a separate process, which ends together with its children."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from contextlib import suppress
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

from rich.console import Console

from bench.common.children import python_path
from bench.common.results import ResultFile, Row, read_run
from bench.robustness.deployments.cells import Cell, run_cell
from bench.robustness.families.cells import FAILED
from vllm_sparse_plugin.tools.server import unwind_on_termination

_LONGEST_LOG = 3000
_UNWIND_SECONDS = 60


def try_alone(name: str, output: Path, seconds: float, console: Console) -> Row:
    """Tries one deployment in a separate process, and returns its line of the result file."""
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        log, count = Path(folder) / "log", len(read_run(output).rows)
        log.touch()
        process = _fresh_process().Process(target=_cell, args=(name, output, log))
        process.start()
        try:
            process.join(seconds)
            late = process.is_alive()
        finally:
            # It ends its servers, which lead separate process groups. Workers are in its group.
            process.terminate()
            process.join(_UNWIND_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        if len(read_run(output).rows) == count:
            reason = f"it took longer than {seconds:.0f} seconds" if late else f"exit code {process.exitcode}"
            with ResultFile(output) as file:
                file.write(Cell(name, FAILED, reason).as_row())
        row = read_run(output).rows[-1]
        if row["outcome"] == FAILED:
            console.print(log.read_text(encoding="utf-8", errors="replace")[-_LONGEST_LOG:], markup=False)
        return row


@cache
def _fresh_process() -> ForkServerContext:
    """Makes processes that have already imported vLLM, because the import takes longer than most deployments."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Waiting threads must not spin: there may be more threads than cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["PYTHONPATH"] = python_path()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["vllm.entrypoints.llm", "vllm.v1.engine.core", "bench.robustness.deployments.cells"]
    )
    return context


def _cell(name: str, output: Path, log: Path) -> None:
    """Tries one deployment in this process as the leader of a process group, and writes its line."""
    os.setsid()
    unwind_on_termination()
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    row = run_cell(name, written(output)).as_row()
    with ResultFile(output) as out:
        out.write(row)


def written(output: Path) -> dict[str, Row]:
    """The latest line of each deployment in a result file."""
    return {row["deployment"]: row for row in read_run(output).rows}
