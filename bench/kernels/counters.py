"""Hardware counters of the kernels of a call, read by Nsight Compute."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench.common.children import child_environment
from vllm_sparse_plugin.errors import ConfigurationError

NCU = "ncu"
"""The command line of Nsight Compute."""
_METRICS = {
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
    "nanoseconds": "gpu__time_duration.sum",
    "bandwidth_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
}
_NAME, _ID = "Kernel Name", "ID"
_SECONDS = 120.0


class Kernel(NamedTuple):
    """One kernel of a call."""

    name: str
    read_bytes: float
    """From memory, not from the L2 cache."""
    written_bytes: float
    nanoseconds: float
    """With the counters on, which is slower than without."""
    bandwidth_percent: float
    """Of the largest bandwidth."""


def read_counters(text: str) -> list[Kernel]:
    """Return the kernels in what `ncu --csv --page raw --print-units base` prints.

    Raises:
        ConfigurationError: there is no table; the message has the last line.
    """
    lines = text.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith(f'"{_ID}"')), None)
    if first is None:
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        raise ConfigurationError(f"{NCU}: got {last!r}, allowed: a table of counters")
    # A row of units follows the names of the columns.
    rows = [row for row in csv.DictReader(lines[first:]) if (row[_ID] or "").isdigit()]
    return [
        Kernel(row[_NAME].partition("(")[0], *(float(row[each].replace(",", "")) for each in _METRICS.values()))
        for row in rows
    ]


def run_counted(call: Callable[[], Any], l2_bytes: int, device: torch.device) -> None:
    """Run a call with the profiler on, after it has been warmed up, with an L2 cache that does not hold its inputs."""
    for _ in range(3):
        call()
    torch.full((2 * l2_bytes,), 1, dtype=torch.uint8, device=device).sum()
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize(device)
    torch.cuda.profiler.stop()


def count(arguments: list[str]) -> list[Kernel]:
    """Run `python -m bench.kernels` with arguments under Nsight Compute.

    Raises:
        ConfigurationError: Nsight Compute is missing, or gives no counters.
    """
    command = [
        NCU, "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off",
        "--clock-control", "none", "--metrics", ",".join(_METRICS.values()),
        sys.executable, "-m", "bench.kernels", *arguments,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_SECONDS,
            env=child_environment(), check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise ConfigurationError(f"{NCU}: got no such program, allowed: Nsight Compute on PATH") from None
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"{NCU}: got no table within {_SECONDS:g} s, allowed: a table of counters") from None
    return read_counters(done.stdout)
