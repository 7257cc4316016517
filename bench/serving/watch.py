"""How many requests a server runs at once, and how full its cache is, while a load is applied."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from httpx import HTTPError

from bench.common.results import Row
from bench.soak.clients import read_metrics

_SECONDS = 0.5
"""Between two looks."""
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE, _PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"


@dataclass
class Watched:
    """What was seen of a server, look by look."""

    running: list[float] = field(default_factory=list)
    """Requests that run, where others wait: the cache is then what limits them, or the most that may run."""
    most_running: float = 0.0
    usage: float = 0.0
    """The fullest cache, as a share."""
    preemptions: list[float] = field(default_factory=list)

    def add(self, metrics: dict[str, float]) -> None:
        """Count a look at `/metrics`."""
        running = metrics.get(_RUNNING, 0.0)
        if metrics.get(_WAITING, 0.0):
            self.running.append(running)
        self.most_running = max(self.most_running, running)
        self.usage = max(self.usage, metrics.get(_USAGE, 0.0))
        self.preemptions.append(metrics.get(_PREEMPTIONS, 0.0))

    def columns(self) -> Row:
        """The columns of a row."""
        mean = sum(self.running) / len(self.running) if self.running else None
        return {
            "running_most": int(self.most_running),
            "running_mean_while_others_wait": None if mean is None else round(mean, 1),
            "kv_cache_usage_most": round(self.usage, 4),
            "preemptions": int(self.preemptions[-1] - self.preemptions[0]) if self.preemptions else 0,
        }


@contextmanager
def watch(read: Callable[[], str]) -> Iterator[Watched]:
    """Look at a server again and again.

    Args:
        read: returns the text of its `/metrics`.
    """
    watched, done = Watched(), threading.Event()

    def look() -> None:
        while True:
            try:
                watched.add(read_metrics(read()))
            except HTTPError:
                return  # who applies the load says what is wrong
            if done.wait(_SECONDS):
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield watched
    finally:
        done.set()
        thread.join()
