"""The number of running requests and the use of the cache of a server under load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from httpx import HTTPError

from bench.common.metrics import read_metrics
from bench.common.repeated import repeated
from bench.common.results import Row

_SECONDS = 0.5
"""Interval between samples."""
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE, _PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"
_TOKENS, _COMPLETED = "vllm:generation_tokens_total", "vllm:request_success_total"


@dataclass
class Watched:
    """Samples of a server's metrics."""

    looks: list[dict[str, float]] = field(default_factory=list)
    """The metrics of each sample."""
    times: list[float] = field(default_factory=list)
    """Times of the samples, in seconds."""

    def add(self, metrics: dict[str, float]) -> None:
        """Adds a sample of `/metrics`."""
        self.times.append(time.monotonic())
        self.looks.append(metrics)

    def _seen(self, name: str) -> list[float]:
        return [metrics.get(name, 0.0) for metrics in self.looks]

    def _grown(self, name: str) -> int:
        """The increase of a counter from the first sample to the last."""
        seen = self._seen(name)
        return int(seen[-1] - seen[0]) if seen else 0

    def columns(self) -> Row:
        """The columns of a row."""
        running, waiting = self._seen(_RUNNING), self._seen(_WAITING)
        # The cache, or the limit of running requests, is then the bottleneck.
        limited = [number for number, others in zip(running, waiting, strict=True) if others]
        return {
            "running_most": int(max(running, default=0)),
            "running_mean_while_others_wait": round(sum(limited) / len(limited), 1) if limited else None,
            "kv_cache_usage_most": round(max(self._seen(_USAGE), default=0), 4),
            "preemptions": self._grown(_PREEMPTIONS),
        }

    def window_columns(self) -> Row:
        """The columns of a row about the time between the first sample and the last.

        Raises:
            ChildProcessError: if this time is zero.
        """
        seconds = self.times[-1] - self.times[0] if self.times else 0.0
        if not seconds:
            raise ChildProcessError("the server's metrics could not be read twice")
        running, tokens = self._seen(_RUNNING), self._grown(_TOKENS)
        return {
            "window_seconds": round(seconds, 1),
            "completed": self._grown(_COMPLETED),
            "output_tokens_total": tokens,
            "output_tokens_per_second": round(tokens / seconds, 2),
            "running_mean": round(sum(running) / len(running), 1),
            **self.columns(),
        }


@contextmanager
def watch(read: Callable[[], str]) -> Iterator[Watched]:
    """Sample a server first, last, and repeatedly in between.

    Args:
        read: returns the text of its `/metrics`.
    """
    watched = Watched()

    def look() -> bool:
        try:
            watched.add(read_metrics(read()))
        except HTTPError:
            return False  # the load reports the failure
        return True

    look()
    try:
        with repeated(look, _SECONDS):
            yield watched
    finally:
        look()
