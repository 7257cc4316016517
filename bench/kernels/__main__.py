"""Command line of the kernel benchmark: `python -m bench.kernels`."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.common.options import Commit, Output, TimeLimit, make_app, parse_grid, parse_names, parse_sizes
from bench.common.results import ResultFile, Run, read_run
from bench.kernels.cases import FORMATS, OPS, QUICK, Case, Geometry, Grid, TopKCase
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import run_app
from vllm_sparse_plugin.tools.provenance import describe_run

_RESERVED_BYTES = 10 << 30
"""Device memory outside the cache: float32 copies of the references, workspaces, graphs."""

app = make_app("Measure the kernels on a GPU, and the rivals of each.")


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
    given: dict[str, Any] = {
        "ops": parse_names("only", only, OPS) if only else None,
        "steps": parse_grid(grid) if grid else None,
        "groups": parse_sizes("groups", groups) if groups else None,
        "formats": parse_names("formats", formats, FORMATS) if formats else None,
    }
    cases = replace(QUICK if quick else Grid(), **{name: value for name, value in given.items() if value})
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "device: got a machine with no CUDA device, allowed: one with a GPU; `table` works without one"
        )
    if not build:
        # Building its operators takes minutes each without output.
        os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")

    # Triton's interpreter or compiler is chosen when its kernels are imported.
    from bench.kernels.providers import PROVIDERS
    from bench.kernels.runner import LEFT_OUT, MEASURED, Runner, is_broken, print_results
    from bench.kernels.timing import COLD_REPEATS, WARM_REPEATS, GraphTimer
    from bench.kernels.workload import Workload

    device = torch.device("cuda", torch.cuda.current_device())
    geometry, timer = Geometry(num_kv_heads=kv_heads, k=budget_pages), GraphTimer(device)
    header = {
        **describe_run(commit=commit, packages=("triton", "flashinfer-python")),
        "launch_floor": timer.launch_floor(),
        "geometry": vars(geometry),
        "method": {"cold_repeats": COLD_REPEATS, "warm_repeats": WARM_REPEATS, "l2_bytes": timer.l2_bytes},
    }
    plan = cases.plan()
    free, _ = torch.cuda.mem_get_info(device)
    workload = Workload(geometry, device, cache_blocks(plan, geometry, free - _RESERVED_BYTES))
    with ResultFile(output, header) as file:
        rows = Runner(PROVIDERS, workload, timer, file.write, lambda: deadline - time.monotonic()).run(plan)
    print_results(Run(header, rows))
    measured, left_out = (sum(row["status"] == status for row in rows) for status in (MEASURED, LEFT_OUT))
    print(f"{measured} of {len(rows)} rows measured, {left_out} left out.")
    broken = [row for row in rows if is_broken(row, PROVIDERS)]
    if broken:
        print(f"{len(broken)} rows are broken.")
        raise typer.Exit(1)


@app.command()
def table(results: Annotated[Path, typer.Argument(help="JSON lines written by `run`.")]) -> None:
    """Print the tables of a result file."""
    from bench.kernels.runner import print_results

    found = read_run(results)
    if "launch_floor" not in found.about:
        raise ConfigurationError(f"results: got {str(results)!r}, allowed: a file of `python -m bench.kernels run`")
    print_results(found)


def main() -> None:
    """Runs the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
