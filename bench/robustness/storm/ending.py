"""What a storm leaves: the state of an idle server, and its end by SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.common.metrics import cache_blocks, read_metrics

_END_SECONDS = 60.0
"""Longest wait for the end of the server's processes."""
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Idle:
    """An idle server."""

    running: int
    waiting: int
    used_blocks: int
    """Blocks that requests hold. Cached blocks without a request are free."""
    blocks: int
    preemptions: int


def read_idle(text: str) -> Idle:
    """Reads a `/metrics` text."""
    metrics, blocks = read_metrics(text), cache_blocks(text)
    return Idle(
        int(metrics["vllm:num_requests_running"]),
        int(metrics["vllm:num_requests_waiting"]),
        round(metrics["vllm:kv_cache_usage_perc"] * blocks),
        blocks,
        int(metrics["vllm:num_preemptions_total"]),
    )


def health(url: str) -> int | None:
    """The status of `/health`; None without an answer."""
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=_END_SECONDS, trust_env=False).status_code
    return None


@dataclass(frozen=True)
class End:
    """The end of a server by SIGTERM."""

    seconds: float
    """Until no process was left."""
    left: list[str]
    """Processes that did not end in time."""


def end_by_sigterm(process: subprocess.Popen[bytes], left: Callable[[int], list[str]] | None = None) -> End:
    """Sends SIGTERM to a server, and waits until it and its processes have ended.

    Args:
        process: the leader of its process group.
        left: returns the names of a group's processes; None to read them from /proc.
    """
    start, names = time.monotonic(), left or processes_of
    process.send_signal(signal.SIGTERM)
    while (process.poll() is None or names(process.pid)) and time.monotonic() < start + _END_SECONDS:
        time.sleep(_LOOK_SECONDS)
    return End(round(time.monotonic() - start, 1), names(process.pid))


def processes_of(group: int) -> list[str]:
    """The names of the processes of a group. Processes that have ended do not count."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            name, _, rest = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
            state, _parent, of, *_ = rest.split()
            if folder.name.isdecimal() and int(of) == group and state not in "ZX":
                found.append(name.partition("(")[2])
    return sorted(found)
