"""Serves tiny models of many families in whole engines, and writes the outcomes.

python -m bench.robustness families --output families.jsonl
python -m bench.robustness families --output families.jsonl --family llama --way unique
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from bench.common.children import run_python
from bench.common.console import open_console
from bench.common.options import Commit, Output, TimeLimit, parse_names
from bench.common.results import ResultFile, Row, read_run
from bench.robustness.families.cells import FAILED, Cell
from bench.robustness.families.table import FAMILIES, FEATURES, FEATURES_OF, WAYS
from vllm_sparse_plugin.tools.provenance import describe_run

_LONGEST_LOG = 2000


def families(
    output: Output,
    family: Annotated[list[str] | None, typer.Option(help=f"Repeatable. Default: {', '.join(FAMILIES)}.")] = None,
    way: Annotated[
        list[str] | None, typer.Option(help=f"Way of attention, repeatable. Default: {', '.join(WAYS)}.")
    ] = None,
    features: Annotated[bool, typer.Option(help="Also test vLLM's features.")] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Families that run at once, each in a separate process.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Run only the cells that the file lacks.")] = False,
    family_seconds: Annotated[float, typer.Option(min=1, help="Time limit of a family.")] = 900,
    time_limit: TimeLimit = 7200,
    commit: Commit = None,
) -> None:
    """Serve a tiny model of every family in every way of attention; exit code 3 if one fails."""
    end = time.monotonic() + time_limit
    names = parse_names("family", family or FAMILIES, list(FAMILIES))
    ways = parse_names("way", way or WAYS, list(WAYS))
    wanted = list(itertools.product(names, ways))
    if features:
        wanted += [(FEATURES_OF, feature) for feature in FEATURES]
    if resume:
        before = _written(output)
        wanted = [cell for cell in wanted if cell not in before]
    with ResultFile(output, describe_run(commit=commit), append=resume):
        pass
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder, ThreadPoolExecutor(jobs) as pool:

        def serve(name: str) -> str:
            arguments = ["family-cells", "--output", str(output.resolve()), "--family", name]
            arguments += [part for of, choice in wanted if of == name for part in ("--way", choice)]
            log = Path(folder) / f"{name}.log"
            code = run_python("bench.robustness", arguments, min(family_seconds, end - time.monotonic()), log)
            if code == 0:
                return ""
            print(f"{name}:\n{log.read_text(encoding='utf-8', errors='replace')[-_LONGEST_LOG:]}", file=sys.stderr)
            return "took too long" if code is None else f"its process ended with {code}"

        groups = list(dict.fromkeys(group for group, _ in wanted))
        ends = dict(zip(groups, pool.map(serve, groups), strict=True))
    written = _written(output)
    with ResultFile(output) as file:
        for name, choice in wanted:
            if (name, choice) not in written:
                file.write(Cell(name, choice, FAILED, ends[name] or "no result").as_row())
    rows = read_run(output).rows
    _print(rows, names, ways)
    if any(row["status"] == FAILED for row in rows):
        raise typer.Exit(3)


def _written(output: Path) -> set[tuple[str, str]]:
    return {(row["family"], row["way"]) for row in read_run(output).rows}


def _print(rows: Sequence[Row], names: Sequence[str], ways: Sequence[str]) -> None:
    status = {(row["family"], row["way"]): row["status"] for row in rows}
    table = Table("family", *ways)
    for name in names:
        table.add_row(name, *(status.get((name, way), "not run") for way in ways))
    console = open_console()
    console.print(table)
    reasons = {(row["family"], row["reason"]): row for row in rows if row["reason"]}
    for (name, reason), row in reasons.items():
        console.print(f"{name}, {row['way']}: {row['status']}: {reason}", markup=False)
    for row in rows:
        if row["family"] == FEATURES_OF:
            console.print(f"{row['way']}: {row['status']}", markup=False)


def family_cells(
    output: Output,
    family: Annotated[str, typer.Option()],
    way: Annotated[list[str], typer.Option()],
) -> None:
    """Serve one family, in this process."""
    # Waiting threads must not spin: there may be more threads than cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from bench.robustness.families.engines import run_family
    from bench.robustness.families.features import run_features

    with ResultFile(output) as file:
        for cell in run_features(way) if family == FEATURES_OF else run_family(family, way):
            file.write(cell.as_row())
