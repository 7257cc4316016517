"""Command line of the kernel benchmark."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.common.console import open_console
from bench.common.options import Commit, Output, TimeLimit, make_app, parse_grid, parse_names, parse_sizes
from bench.common.results import ResultFile, Run
from bench.kernels.cases import FORMATS, OPS, QUICK, Case, Geometry, Grid, TopKCase
from bench.kernels.report import print_results, read_results
from bench.kernels.runner import LEFT_OUT, MEASURED, Runner, is_broken
from bench.kernels.timing import COLD_REPEATS, WARM_REPEATS
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.provenance import describe_run

_RESERVED_BYTES = 10 << 30
"""Device memory outside the cache: float32 copies of the references, workspaces, graphs."""

app = make_app("Measure the kernels on a GPU, and the rivals of each.")


def grid_of(
    quick: bool,
    only: list[str] | None,
    grid: list[str] | None,
    groups: list[str] | None,
    formats: list[str] | None = None,
) -> Grid:
    """The default or the quick grid, changed by the options.

    Raises:
        ConfigurationError: for a value of an option that is not allowed.
    """
    given: dict[str, Any] = {
        "ops": parse_names("only", only, OPS) if only else None,
        "steps": parse_grid(grid, largest=False) if grid else None,
        "groups": parse_sizes("groups", groups) if groups else None,
        "formats": parse_names("formats", formats, FORMATS) if formats else None,
    }
    return replace(QUICK if quick else Grid(), **{name: value for name, value in given.items() if value})


def cache_blocks(plan: list[tuple[str, Case]], geometry: Geometry, free_bytes: int) -> int:
    """Blocks of the largest case that fits into free memory."""
    cases = [case for _, case in plan if not isinstance(case, TopKCase)]
    largest = max((geometry.block_elements(case.format) for case in cases), default=1) * 2
    return max((blocks for case in cases if (blocks := case.blocks(geometry)) * largest <= free_bytes), default=1)


@app.command()
def run(
    output: Output,
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(OPS)}. Default: all.")] = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="CONTEXT=BATCH,... of decode steps. Default: 2K,8K,32K,128K,512K=1,4,8,32.")
    ] = None,
    groups: Annotated[
        list[str] | None, typer.Option(help="Query heads per KV head, most important first. Default: 4,8,1.")
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(FORMATS)}; the first two for whole decode steps. Default: all but leveled."),
    ] = None,
    budget_pages: Annotated[int, typer.Option(help="Pages that a decode step reads per request.")] = Geometry.k,
    kv_heads: Annotated[
        int, typer.Option(min=1, help="KV heads of the layer: 1 as on a worker of tensor parallelism 8.")
    ] = Geometry.num_kv_heads,
    quick: Annotated[bool, typer.Option("--quick", help="Few cases, formats int4 and int8.")] = False,
    time_limit: TimeLimit = 480,
    build: Annotated[bool, typer.Option("--build", help="Let FlashInfer compile missing kernels.")] = False,
    commit: Commit = None,
) -> None:
    """Check and time every case; print tables and write one line for each provider and case.

    Exits with 1 if a provider is wrong or crashes, or if an operation of this project is missing.
    """
    deadline = time.monotonic() + time_limit
    cases = grid_of(quick, only, grid, groups, formats)
    _require_gpu()
    if not build:
        # Building its operators takes minutes each without output.
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")

    # Triton's interpreter or compiler is chosen when its kernels are imported.
    from bench.kernels.bandwidth import read_bandwidth
    from bench.kernels.providers import PROVIDERS
    from bench.kernels.timing import GraphTimer
    from bench.kernels.workload import Workload

    console = open_console()
    device = torch.device("cuda", torch.cuda.current_device())
    geometry = Geometry(num_kv_heads=kv_heads, k=budget_pages)
    bandwidth = read_bandwidth(device)
    description = describe_run(commit=commit, packages=("triton", "flashinfer-python"))
    torch.cuda.empty_cache()
    timer = GraphTimer(device)
    header = {
        **description,
        "read_bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "launch_floor": timer.launch_floor().fields(),
        "geometry": vars(geometry),
        "method": {"cold_repeats": COLD_REPEATS, "warm_repeats": WARM_REPEATS, "l2_bytes": timer.l2_bytes},
    }
    plan = cases.plan()
    free, _ = torch.cuda.mem_get_info(device)
    workload = Workload(geometry, device, cache_blocks(plan, geometry, free - _RESERVED_BYTES))
    with ResultFile(output, header) as file:
        runner = Runner(PROVIDERS, workload, timer, bandwidth, file.write, lambda: deadline - time.monotonic())
        rows = runner.run(plan)
    print_results(console, Run(header, rows))
    measured = sum(row["status"] == MEASURED for row in rows)
    left_out = sum(row["status"] == LEFT_OUT for row in rows)
    console.print(f"{measured} of {len(rows)} rows measured, {left_out} left out.")
    broken = [row for row in rows if is_broken(row, PROVIDERS)]
    if broken:
        console.print(f"{len(broken)} rows are broken.", style="red")
        raise typer.Exit(1)


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "device: got a machine with no CUDA device, allowed: one with a GPU; `table` works without one"
        )


@app.command()
def table(results: Annotated[Path, typer.Argument(help="JSON lines written by `run`.")]) -> None:
    """Print the tables of a result file."""
    print_results(open_console(), read_results(results))
