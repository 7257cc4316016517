"""Tests the state of a layer with random schedules, and writes the outcome of each seed.

python -m bench.robustness fuzz --steps 5000 --seeds 0-19 --output fuzz.jsonl
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.table import Table

from bench.common.console import open_console
from bench.common.options import Commit, Output, TimeLimit, split_values
from bench.common.results import ResultFile, read_run
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run


def fuzz(
    output: Output,
    seeds: Annotated[
        list[str] | None, typer.Option(help="Seed or range such as 7 or 0-19, repeatable. Default: 0-8.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the scheduler for each seed.")] = 5000,
    resume: Annotated[bool, typer.Option("--resume", help="Run only the seeds that the file lacks.")] = False,
    time_limit: TimeLimit = 7200,
    commit: Commit = None,
) -> None:
    """Run random schedules of one layer, with other settings for each seed; exit code 3 if a state was wrong."""
    end = time.monotonic() + time_limit
    wanted = parse_seeds(seeds or ["0-8"])
    done = {row["seed"] for row in read_run(output).rows} if resume and output.exists() else set()
    with ResultFile(output, describe_run(commit=commit), append=bool(done)) as file:
        _run([seed for seed in wanted if seed not in done], steps, end, file)
    rows = read_run(output).rows
    table = Table("policy", "seeds", "steps", "faults")
    for policy in dict.fromkeys(row["policy"] for row in rows):
        of = [row for row in rows if row["policy"] == policy]
        faults = sum(bool(row["fault"]) for row in of)
        table.add_row(policy, str(len(of)), f"{sum(row['steps'] for row in of):,}", str(faults))
    console = open_console()
    console.print(table)
    for row in rows:
        if row["fault"]:
            console.print(f"seed {row['seed']}, {row['policy']}: {row['fault']}", markup=False)
    if any(row["fault"] for row in rows):
        raise typer.Exit(3)


def parse_seeds(values: Iterable[str]) -> list[int]:
    """Parse `7`, `0-19` and several of them separated by commas.

    Raises:
        ConfigurationError: for anything else.
    """
    found: list[int] = []
    for part in split_values(values):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ConfigurationError(f"seeds: got {part!r}, allowed: numbers and ranges such as 7 or 0-19")
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


def _run(seeds: Iterable[int], steps: int, end: float, file: ResultFile) -> None:
    import torch

    from bench.robustness.fuzz.schedule import Fuzz

    # The shapes are tiny: several threads would only wait for each other.
    torch.set_num_threads(1)
    for seed in seeds:
        if time.monotonic() >= end:
            break
        file.write(Fuzz(seed).run(steps, end).as_row())
