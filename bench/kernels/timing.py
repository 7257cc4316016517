"""Two ways to time a call. Cold: one replay of its graph at a time, after clearing the L2 cache. Warm: many copies of
it in one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bench.common.results import Row, spread

COLD_REPEATS = 40
WARM_REPEATS = 20
_WARM_COPIES = 20
_WARM_US = 2000.0
"""Target time of a warm graph. The overhead of a graph is small compared with this."""


@dataclass
class GraphRecording:
    """A call as two CUDA graphs."""

    single: torch.cuda.CUDAGraph
    output: Any
    many: torch.cuda.CUDAGraph
    copies: int
    call: Callable[[], Any]
    """Keeps alive what the graphs point to: workspaces, schedules."""

    def replay(self) -> Any:
        """Runs the call once, exactly as it is timed, and returns its output."""
        self.single.replay()
        return self.output


class GraphTimer:
    """Times CUDA graphs with events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._swept = torch.empty(3 * self.l2_bytes // 4, dtype=torch.float32, device=device)
        self._total = torch.empty((), dtype=torch.float32, device=device)
        self._sweep_l2()
        self._sweep, _ = self._capture(self._sweep_l2, 1)

    def _sweep_l2(self) -> None:
        # Reading after writing leaves no dirty lines, so the measured call does not pay for their write-back.
        self._swept.zero_()
        torch.sum(self._swept, dim=0, out=self._total)

    def _capture(self, call: Callable[[], Any], copies: int) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        output = None
        with torch.cuda.graph(graph):
            for _ in range(copies):
                # The last copy's output is released first, so that all copies write the same memory.
                output = None
                output = call()
        return graph, output

    def record(self, call: Callable[[], Any]) -> GraphRecording:
        """Warm a call up and capture its graphs. Errors of the call pass through."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        single, output = self._capture(call, 1)
        microseconds = min(self._times({"": single}, 3, sweep=False)[""])
        copies = max(1, min(_WARM_COPIES, int(_WARM_US / max(microseconds, 0.1))))
        many, _ = self._capture(call, copies)
        many.replay()
        torch.cuda.synchronize(self.device)
        return GraphRecording(single, output, many, copies, call)

    def measure(self, recordings: Mapping[str, GraphRecording]) -> dict[str, Row]:
        """Times recorded calls in turns; returns the columns `cold` and `warm` of each."""
        cold = self._times({name: each.single for name, each in recordings.items()}, COLD_REPEATS, sweep=True)
        warm = self._times({name: each.many for name, each in recordings.items()}, WARM_REPEATS, sweep=False)
        return {
            name: {
                "cold": _spread(cold[name]),
                "warm": _spread([total / each.copies for total in warm[name]]) | {"copies": each.copies},
            }
            for name, each in recordings.items()
        }

    def _times(self, graphs: Mapping[str, torch.cuda.CUDAGraph], repeats: int, sweep: bool) -> dict[str, list[float]]:
        """Microseconds of graphs that take turns."""
        events = {
            name: [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
            for name in graphs
        }
        for repeat in range(repeats):
            for name, graph in graphs.items():
                begin, end = events[name][repeat]
                # This takes the device longer than the host needs to queue the rest, so the graph never waits for the
                # host between its events.
                (self._sweep if sweep else graph).replay()
                begin.record()
                graph.replay()
                end.record()
        torch.cuda.synchronize(self.device)
        return {name: [1e3 * begin.elapsed_time(end) for begin, end in pairs] for name, pairs in events.items()}

    def launch_floor(self) -> Row:
        """Times of a nearly empty graph: the part of a cold time that is launch and events."""
        return self.measure({"nothing": self.record(lambda: self._total.add_(1))})["nothing"]


def _spread(microseconds: list[float]) -> Row:
    median, low, high = spread(microseconds)
    return {"median_us": median, "p20_us": low, "p80_us": high, "repeats": len(microseconds)}
