"""The block about deployments of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.common.pages import Block, group_rows, table
from bench.common.results import RESULTS, Row, read_run
from bench.robustness.deployments.table import DENSE, DEPLOYMENTS, PLAIN

FILES: Mapping[str, Path] = {
    "CPU": RESULTS / "cpu-2core" / "deployments" / "all.jsonl",
    "GPU": RESULTS / "h200" / "deployments" / "all.jsonl",
}
"""The result files by device. A missing file is not measured yet."""
_NOT_RUN = "not run"


def read_cells(path: Path) -> dict[str, Row]:
    """The latest line of each deployment in a result file; empty for a missing file."""
    return {row["deployment"]: row for row in read_run(path).rows} if path.exists() else {}


def deployments() -> Block:
    """The outcome of each deployment by device; deployments with the same outcome share a row."""
    cells = [read_cells(path) for path in FILES.values()]
    rows = group_rows(
        [name, *(_sign(of.get(name)) for of in cells)] for name in DEPLOYMENTS if name not in (DENSE, PLAIN)
    )
    return Block(table(["deployment", *FILES], rows), [path for path in FILES.values() if path.exists()])


def _sign(row: Row | None) -> str:
    return _NOT_RUN if row is None else str(row["outcome"])
