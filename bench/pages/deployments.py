"""The block about deployments of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, Row, read_run
from bench.robustness.deployments.table import DEPLOYMENTS

FILES: Mapping[str, Path] = {
    "CPU": RESULTS / "cpu-2core" / "deployments" / "all.jsonl",
    "GPU": RESULTS / "h200" / "deployments" / "all.jsonl",
}
"""The result files by device; one that is not there was not measured yet."""
_NOT_RUN = "not run"


def read_cells(path: Path) -> dict[str, Row]:
    """The lines of a result file by deployment, the latest of each; none of a file that is not there."""
    return {row["deployment"]: row for row in read_run(path).rows} if path.exists() else {}


def deployments() -> Block:
    """What became of each deployment by device, and why."""
    cells = {device: read_cells(path) for device, path in FILES.items()}
    rows = [
        [name, deployment.about, *(_sign(of.get(name)) for of in cells.values())]
        for name, deployment in DEPLOYMENTS.items()
    ]
    parts = [table(["deployment", "what is done", *cells], rows)]
    for device, of in cells.items():
        if reasons := [_reason(name, of[name]) for name in DEPLOYMENTS if of.get(name, {}).get("reason")]:
            parts += [f"On a {device}:", "\n".join(reasons)]
    return Block("\n\n".join(parts), [path for path in FILES.values() if path.exists()])


def _sign(row: Row | None) -> str:
    return _NOT_RUN if row is None else str(row["outcome"])


def _reason(name: str, row: Row) -> str:
    reason = f"`{row['reason']}`" if not row["asked"] else f"{row['parted']} of {row['asked']} answers, {row['reason']}"
    return wrap(f"- {name}: {row['outcome']}: {reason}.", "  ")
