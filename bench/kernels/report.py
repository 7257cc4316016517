"""Tables of result files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.common.results import Row, Run, read_run
from bench.kernels.runner import LEFT_OUT, MEASURED
from vllm_sparse_plugin.errors import ConfigurationError


def read_results(path: Path) -> Run:
    """The run and the rows of a result file.

    Raises:
        ConfigurationError: if it is not a result file of this command.
    """
    run = read_run(path)
    if "read_bandwidth_gb_s" not in run.about:
        raise ConfigurationError(f"results: got {str(path)!r}, allowed: a file of `python -m bench.kernels run`")
    return run


def print_results(console: Console, run: Run) -> None:
    """Prints a table for each operation, and the cases without a result."""
    about, rows = run.about, run.rows
    for op in dict.fromkeys(row["op"] for row in rows):
        console.print(_table(op, [row for row in rows if row["op"] == op]))
    floor = about["launch_floor"]
    console.print(
        "Microseconds, cold / warm, and how many times as long as the first column; share of bandwidth cold.\n"
        f"{run.machine}: reads {about['read_bandwidth_gb_s']:,.0f} GB/s; "
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
