"""Tries deployments of vLLM, each in a separate process, and writes the outcomes.

python -m bench.robustness deployments --output deployments.jsonl
python -m bench.robustness deployments --output deployments.jsonl --resume --deployment "tensor parallel 2"
"""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table

from bench.common.console import open_console
from bench.common.options import Commit, Output, TimeLimit, parse_names
from bench.common.results import ResultFile
from bench.robustness.deployments.alone import try_alone, written
from bench.robustness.deployments.table import DENSE, DEPLOYMENTS, PLAIN
from bench.robustness.families.cells import FAILED
from vllm_sparse_plugin.tools.provenance import describe_run


def deployments(
    output: Output,
    deployment: Annotated[
        list[str] | None, typer.Option(help="Deployment, repeatable; the plain ones always run. Default: all.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Run the deployments that the file lacks or that failed.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, help="Time limit of a deployment.")] = 300,
    time_limit: TimeLimit = 7200,
    commit: Commit = None,
) -> None:
    """Try deployments of vLLM one after the other; exit code 3 if one fails."""
    end = time.monotonic() + time_limit
    names = parse_names("deployment", [DENSE, PLAIN, *(deployment or DEPLOYMENTS)], list(DEPLOYMENTS))
    before = written(output) if resume and output.exists() else {}
    with ResultFile(output, describe_run(commit=commit), append=bool(before)):
        pass
    console = open_console()
    for name in names:
        left = min(seconds, end - time.monotonic())
        if left > 0 and before.get(name, {"outcome": FAILED})["outcome"] == FAILED:
            row = try_alone(name, output, left, console)
            console.print(f"{name}: {row['outcome']}: {row['reason']} ({row['seconds']} s)", markup=False)
    rows = written(output)
    table = Table("deployment", "outcome", "seconds")
    for name, row in rows.items():
        table.add_row(name, row["outcome"], str(row["seconds"]))
    console.print(table)
    if any(row["outcome"] == FAILED for row in rows.values()):
        raise typer.Exit(3)
