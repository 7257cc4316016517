"""The machine and the code, in addition to the standard header of result files."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Any

import torch

from bench.common.results import ROOT
from vllm_sparse_plugin.tools.provenance import describe_run

_PACKAGES = ("triton", "flashinfer-python")


def _output(*command: str) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    return None


def commit() -> str | None:
    """Commit of the checkout, `+changes` if files differ from it; None outside a checkout."""
    head = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if head is None:
        return None
    return (
        f"{head}+changes" if _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no") else head
    )


def describe_device(device: torch.device) -> dict[str, Any]:
    """The GPU, its driver, and its current clocks. Call it while the GPU works."""
    properties = torch.cuda.get_device_properties(device)
    fields = ("driver_version", "clocks.sm", "clocks.mem")
    index = str(device.index or 0)
    answer = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", index)
    found = dict(zip(fields, (value.strip() for value in (answer or "").split(",")), strict=False))
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "driver": found.get("driver_version") or None,
        "sm_clock": found.get("clocks.sm"),
        "memory_clock": found.get("clocks.mem"),
        "cuda": torch.version.cuda,
    }


def describe(device: torch.device, given_commit: str | None) -> dict[str, Any]:
    """The first line of a result file."""
    run = describe_run(packages=_PACKAGES)
    run["hardware"].update(describe_device(device))
    return {**run, "commit": given_commit or commit()}
