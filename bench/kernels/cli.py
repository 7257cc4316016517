"""Command line of the kernel benchmark."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from bench.kernels.cases import OPS, QUICK, Case, DecodeCase, Geometry, Grid, parse_sizes
from bench.kernels.report import ResultFile, print_results, read_results
from bench.kernels.runner import LEFT_OUT, MEASURED, Runner, is_broken
from bench.kernels.timing import COLD_REPEATS, WARM_REPEATS

_RESERVED_BYTES = 10 << 30
"""Device memory kept for what is not the cache: the references' float32 copies, workspaces, graphs."""
_FORMATS = ("svg", "png")

app = typer.Typer(
    help="Measure the kernels on a GPU, each beside its rivals.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _names(allowed: tuple[str, ...], text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"got {name!r}, allowed: {', '.join(allowed)}, separated by commas")
    return names


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        return read_results(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise typer.BadParameter(f"{path.name}: {reason}") from None


def _console() -> Console:
    console = Console()
    # A log has no width of its own, and the tables do not fit into the 80 columns it would get.
    return console if console.is_terminal else Console(width=200)


def grid_of(quick: bool, only: str | None, batches: str | None, contexts: str | None, groups: str | None) -> Grid:
    """The default or the quick grid with what the options replace."""
    given: dict[str, Any] = {
        "ops": _names(OPS, only) if only else None,
        "batches": _sizes(batches) if batches else None,
        "contexts": _sizes(contexts) if contexts else None,
        "groups": _sizes(groups) if groups else None,
    }
    return replace(QUICK if quick else Grid(), **{name: value for name, value in given.items() if value})


def cache_blocks(plan: list[tuple[str, Case]], geometry: Geometry, free_bytes: int) -> int:
    """Blocks of the largest case of the plan that fits into free memory."""
    cases = [case for _, case in plan if isinstance(case, DecodeCase)]
    largest = max((geometry.block_elements(case.format) for case in cases), default=1) * 2
    return max((blocks for case in cases if (blocks := case.blocks(geometry)) * largest <= free_bytes), default=1)


@app.command()
def run(
    output: Annotated[Path, typer.Option(help="JSON lines to write.")],
    only: Annotated[str | None, typer.Option(help=f"Operations, of {', '.join(OPS)}; all by default.")] = None,
    batches: Annotated[str | None, typer.Option(help="Requests of a decode step, such as 1,8.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Tokens of a context, such as 2K,128K.")] = None,
    groups: Annotated[str | None, typer.Option(help="Query heads of a KV head, most important first.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few cases, one format of statistics.")] = False,
    time_limit: Annotated[float, typer.Option(help="Seconds after which no case is begun.", min=1.0)] = 480.0,
    build: Annotated[bool, typer.Option("--build", help="Let FlashInfer compile what is not built ahead.")] = False,
    commit: Annotated[str | None, typer.Option(help="Commit to record where the checkout has no history.")] = None,
) -> None:
    """Check and time every case; print tables and write one line for each provider and case.

    Exits with 1 if a provider computes something wrong or crashes, or if one of our own is missing.
    """
    deadline = time.monotonic() + time_limit
    grid = grid_of(quick, only, batches, contexts, groups)
    if not torch.cuda.is_available():
        raise typer.BadParameter("this machine has no CUDA device; `table` and `plot` work without one")
    if not build:
        # Building its operators takes minutes each, silently.
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")

    # Triton's interpreter and compiler are chosen when its kernels are imported.
    from bench.kernels.bandwidth import read_bandwidth
    from bench.kernels.environment import describe
    from bench.kernels.providers import PROVIDERS
    from bench.kernels.timing import GraphTimer
    from bench.kernels.workload import Workload

    console = _console()
    device, geometry = torch.device("cuda", torch.cuda.current_device()), Geometry()
    bandwidth = read_bandwidth(device)
    description = describe(device, commit)
    torch.cuda.empty_cache()
    timer = GraphTimer(device)
    header = {
        **description,
        "read_bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "launch_floor": timer.launch_floor().fields(),
        "geometry": vars(geometry),
        "method": {"cold_repeats": COLD_REPEATS, "warm_repeats": WARM_REPEATS, "l2_bytes": timer.l2_bytes},
    }
    plan = grid.plan()
    free, _ = torch.cuda.mem_get_info(device)
    workload = Workload(geometry, device, cache_blocks(plan, geometry, free - _RESERVED_BYTES))
    with ResultFile(output) as file:
        file.write(header)
        runner = Runner(PROVIDERS, workload, timer, bandwidth, file.write, lambda: deadline - time.monotonic())
        rows = runner.run(plan)
    print_results(console, header, rows)
    measured = sum(row["status"] == MEASURED for row in rows)
    left_out = sum(row["status"] == LEFT_OUT for row in rows)
    console.print(f"{measured} of {len(rows)} rows measured, {left_out} left out.")
    broken = [row for row in rows if is_broken(row, PROVIDERS)]
    if broken:
        console.print(f"{len(broken)} rows are broken.", style="red")
        raise typer.Exit(1)


@app.command()
def table(results: Annotated[Path, typer.Argument(help="JSON lines written by `run`.")]) -> None:
    """Print the tables of a result file."""
    print_results(_console(), *_read(results))


@app.command()
def plot(
    results: Annotated[Path, typer.Argument(help="JSON lines written by `run`.")],
    folder: Annotated[Path, typer.Option(help="Where to put the figures.")],
    formats: Annotated[str, typer.Option(help=f"Of {', '.join(_FORMATS)}.")] = ",".join(_FORMATS),
) -> None:
    """Draw the figures of a result file."""
    from bench.kernels.plots import draw

    suffixes = _names(_FORMATS, formats)
    described, rows = _read(results)
    for file in draw(described, rows, folder, suffixes):
        typer.echo(file.name)
