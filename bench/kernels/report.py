"""Result files: writing, reading, and tables of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from bench.kernels.runner import LEFT_OUT, MEASURED, Row


class ResultFile:
    """JSON lines: the run first, then a row for each provider and case, each written at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, row: dict[str, Any]) -> None:
        """Adds a line."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def read_results(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """The run and the rows of a result file.

    Raises:
        ValueError: if it is not one.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except json.JSONDecodeError:
        lines = []
    if not lines or "read_bandwidth_gb_s" not in lines[0]:
        raise ValueError("not a result file of this command")
    return lines[0], lines[1:]


def print_results(console: Console, run: dict[str, Any], rows: Sequence[Row]) -> None:
    """A table for each operation, and what is missing from them."""
    for op in dict.fromkeys(row["op"] for row in rows):
        console.print(_table(op, [row for row in rows if row["op"] == op]))
    floor = run["launch_floor"]
    console.print(
        "Microseconds, cold / warm, and how many times as long as the first column; share of bandwidth cold.\n"
        f"{run['hardware'].get('gpu')}: reads {run['read_bandwidth_gb_s']:,.0f} GB/s; "
        f"a graph that does nothing takes {floor['cold']['median_us']:.1f} / {floor['warm']['median_us']:.1f}."
    )
    missing = Counter(
        (row["status"], row["provider"] if row["status"] != LEFT_OUT else "", row.get("reason", ""))
        for row in rows
        if row["status"] != MEASURED
    )
    for (status, provider, reason), count in missing.items():
        console.print(f"{status}, {count} rows: {provider + ': ' if provider else ''}{reason}", markup=False)


def _table(op: str, rows: Sequence[Row]) -> Table:
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row["case_name"], {})[row["provider"]] = row
    table = Table(op, *providers, "of bandwidth")
    for name, found in cases.items():
        subject = found[providers[0]]
        shares, speed_ups = subject.get("share_of_read_bandwidth"), subject.get("speed_up", {})
        cells = [f"{_times(found[each])}{_ratio(speed_ups.get(each))}" if each in found else "-" for each in providers]
        table.add_row(name, *cells, f"{shares['cold']:.0%}" if shares else "-")
    return table


def _times(row: Row) -> str:
    if row["status"] != MEASURED:
        return str(row["status"])
    return f"{row['cold']['median_us']:.1f} / {row['warm']['median_us']:.1f}"


def _ratio(speed_up: dict[str, float] | None) -> str:
    return f"  {speed_up['cold']:.2f}x" if speed_up else ""
