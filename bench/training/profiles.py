"""What a GPU does while a function runs: launches, and time by kernel."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bench.common.results import Row

_LAUNCH = re.compile(r"(cuda|cu)(LaunchKernel|LaunchCooperativeKernel|MemcpyAsync|MemsetAsync|GraphLaunch)")
_KERNELS = 20
"""Number of listed kernels, those of the most time first."""
_NAME = 80
"""Letters of a kernel's name."""


def summarise(events: Iterable[Any], wall_s: float) -> Row:
    """Sum up the events of torch's profiler.

    Args:
        events: with a `name`, a `device_type`, a `device_time` in microseconds, and whether it
            `is_user_annotation`, a range of several kernels.
        wall_s: seconds from the start of the function to the end of its last kernel.
    """
    launches, times = 0, Counter[str]()
    for event in events:
        if event.device_type.name == "CUDA":
            if not event.is_user_annotation:
                times[event.name[:_NAME]] += event.device_time
        elif _LAUNCH.match(event.name):
            launches += 1
    kernels = {name: round(time / 1e3, 3) for name, time in times.most_common(_KERNELS)}
    busy_ms = round(sum(times.values()) / 1e3, 2)
    return {"launches": launches, "wall_ms": round(wall_s * 1e3, 2), "busy_ms": busy_ms, "kernels_ms": kernels}


def profiled(function: Callable[[], object]) -> Row:
    """Run a function on a GPU; return its launches, its time, the time of all kernels, and that of the slowest ones.

    The profiler slows the host. Another run without it gives the time of the host."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        begin = time.perf_counter()
        function()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begin
    return summarise(found.events(), wall)
