"""Checks and times every case, and prints tables. Each provider gets one row for any outcome."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.common.console import print_beside
from bench.common.results import Row, Run
from bench.kernels.cases import Case
from bench.kernels.checks import CheckError, poison, poisoned_allocations
from bench.kernels.providers import Op, Provider
from bench.kernels.timing import GraphTimer
from bench.kernels.workload import Workload

MEASURED = "measured"
UNAVAILABLE = "unavailable"
"""The provider is not installed or cannot be built."""
WRONG = "wrong"
"""The provider failed the correctness gate and was not timed."""
FAILED = "failed"
"""The provider raised."""
LEFT_OUT = "left out"
"""There was no time, or no memory, for the case."""
_PATH = re.compile(r"(?<![\w.])(?:/[\w.+-]+)+/([\w.+-]+)")


def reason_of(error: BaseException) -> str:
    """One line about an error, without paths of this machine."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return _PATH.sub(r"\1", f"{type(error).__name__}: {first}".rstrip(": "))[:300]


class Runner:
    """Measures a plan, row by row."""

    def __init__(
        self,
        ops: Mapping[str, Op[Any]],
        workload: Workload,
        timer: GraphTimer,
        emit: Callable[[Row], None],
        seconds_left: Callable[[], float],
    ) -> None:
        """Prepares a run.

        Args:
            ops: the providers of each operation.
            workload: makes the inputs of cases.
            timer: times calls.
            emit: takes each row as soon as it is known.
            seconds_left: time until the run has to stop.
        """
        self._ops, self._workload, self._timer = ops, workload, timer
        self._emit, self._seconds_left = emit, seconds_left
        self._loaded: dict[Callable[[], Any], tuple[Any, str | None]] = {}

    def run(self, plan: Sequence[tuple[str, Case]]) -> list[Row]:
        """Measures the cases that fit time and memory. The others are recorded as left out."""
        rows: list[Row] = []
        for op_name, case in plan:
            reason = None if self._seconds_left() > 0 else "the time limit was reached"
            if not self._workload.fits(case):
                reason = "its cache is larger than the free memory of the device"
            if reason is None:
                found = self._measure(op_name, case)
            else:
                left_out = {"status": LEFT_OUT, "reason": reason}
                found = [_head(op_name, provider, case) | left_out for provider in self._ops[op_name].providers]
            for row in found:
                self._emit(row)
            rows += found
        return rows

    def _measure(self, op_name: str, case: Case) -> list[Row]:
        op = self._ops[op_name]
        inputs = op.inputs(self._workload, case)
        rows, recordings = [], {}
        for provider in op.providers:
            row = _head(op_name, provider, case)
            rows.append(row)
            loaded, reason = self._load(provider)
            if reason is not None:
                row.update(status=UNAVAILABLE, reason=reason)
                continue
            # Flushed, so that a provider that kills the process can be identified.
            print(f"{op_name} {case.name}: {provider.name}", file=sys.stderr, flush=True)
            try:
                recordings[provider.name] = self._record(provider, loaded, inputs)
                row["status"] = MEASURED
            except CheckError as error:
                row.update(status=WRONG, reason=str(error))
            except Exception as error:  # a kernel that cannot run this case must not end the run
                row.update(status=FAILED, reason=reason_of(error))
        times = self._timer.measure(recordings) if recordings else {}
        for row in rows:
            row.update(times.get(row["provider"], {}))
        _add_speed_ups(rows, op.subject)
        return rows

    def _load(self, provider: Provider[Any]) -> tuple[Any, str | None]:
        """The loaded provider, or the reason why it cannot be loaded. It is tried once."""
        if provider.load not in self._loaded:
            try:
                self._loaded[provider.load] = provider.load(), None
            except Exception as error:  # a rival's import or build may raise anything
                # Keeping the error would keep the tensors of this case alive.
                self._loaded[provider.load] = None, reason_of(error)
        return self._loaded[provider.load]

    def _record(self, provider: Provider[Any], loaded: Any, inputs: Any) -> Any:
        call = provider.prepare(loaded, inputs)
        recording = self._timer.record(call)

        def poisoned() -> Any:
            with poisoned_allocations():
                return call()

        def replayed() -> Any:
            # Some calls write to memory that they keep: what an earlier run has left there must not pass.
            poison(recording.replay())
            return recording.replay()

        provider.check(inputs, {"call": poisoned, "replayed graph": replayed})
        return recording


def _head(op_name: str, provider: Provider[Any], case: Case) -> Row:
    return {"op": op_name, "provider": provider.name, "case": asdict(case), "case_name": case.name}


def _add_speed_ups(rows: list[Row], subject_name: str) -> None:
    """Adds to the subject's row how many times its time each rival takes."""
    measured = {row["provider"]: row for row in rows if row["status"] == MEASURED}
    subject = measured.pop(subject_name, None)
    if subject is not None:
        subject["speed_up"] = {
            name: {kind: round(row[kind]["median_us"] / subject[kind]["median_us"], 3) for kind in ("cold", "warm")}
            for name, row in measured.items()
        }


def is_broken(row: Row, ops: Mapping[str, Op[Any]]) -> bool:
    """Whether a row makes the command fail: a wrong result, a crash, or a missing subject."""
    if row["status"] in (WRONG, FAILED):
        return True
    return bool(row["status"] == UNAVAILABLE and row["provider"] == ops[row["op"]].subject)


def print_results(run: Run) -> None:
    """Prints a table for each operation, and the cases without a result."""
    for op in dict.fromkeys(row["op"] for row in run.rows):
        rows = [row for row in run.rows if row["op"] == op]
        form = "{cold[median_us]:.1f} / {warm[median_us]:.1f}"
        print_beside(rows, ["op", "case_name"], "provider", "cold.median_us", form)
    floor = [run.about["launch_floor"][kind]["median_us"] for kind in ("cold", "warm")]
    print("Microseconds, cold / warm, and how many times as long the first provider takes cold.")
    print(f"{run.machine}: a graph that does nothing takes {floor[0]:.1f} / {floor[1]:.1f}.")
    reasons = Counter(
        f"{row['status']}, {row['provider']}: {row['reason']}" for row in run.rows if row["status"] != MEASURED
    )
    for reason, count in reasons.items():
        print(f"{count} rows {reason}")
