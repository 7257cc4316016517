"""Checks and times every case. Each provider gets one row for any outcome."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bench.common.results import Row
from bench.kernels.cases import Case, TopKCase
from bench.kernels.checks import CheckError, poison, poisoned_allocations
from bench.kernels.providers import Op, Provider
from bench.kernels.timing import Timer, Timing
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


class DeviceLostError(Exception):
    """The device no longer works; nothing more can be measured."""


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
        timer: Timer,
        bandwidth: float,
        emit: Callable[[Row], None],
        seconds_left: Callable[[], float],
    ) -> None:
        """Prepares a run.

        Args:
            ops: the providers of each operation.
            workload: makes the inputs of cases.
            timer: times calls.
            bandwidth: bytes per second, the reference of shares.
            emit: takes each row as soon as it is known.
            seconds_left: time until the run has to stop.
        """
        self._ops = ops
        self._workload = workload
        self._timer = timer
        self._bandwidth = bandwidth
        self._emit = emit
        self._seconds_left = seconds_left
        self._loaded: dict[Callable[[], Any], tuple[Any, str | None]] = {}

    def run(self, plan: Sequence[tuple[str, Case]]) -> list[Row]:
        """Measures the cases that fit time and memory. The others are recorded as left out."""
        rows: list[Row] = []
        lost: str | None = None
        for op_name, case in plan:
            if lost is None and self._seconds_left() > 0 and self._workload.fits(case):
                try:
                    found = self._measure(op_name, case)
                except DeviceLostError as error:
                    lost = f"the device failed: {error}"
                    found = self._fill(op_name, case, FAILED, lost)
            else:
                found = self._fill(op_name, case, LEFT_OUT, lost or self._why_left_out(case))
            for row in found:
                self._emit(row)
            rows += found
        return rows

    def _why_left_out(self, case: Case) -> str:
        if self._workload.fits(case):
            return "the time limit was reached"
        assert not isinstance(case, TopKCase)
        return f"its cache takes {self._workload.cache_bytes(case) / 1e9:.1f} GB, more than the device has free"

    def _fill(self, op_name: str, case: Case, status: str, reason: str) -> list[Row]:
        """Returns one complete row for each provider of a case that was not measured."""
        return [
            {**self._head(op_name, provider, case), "status": status, "reason": reason}
            for provider in self._ops[op_name].providers
        ]

    def _head(self, op_name: str, provider: Provider[Any], case: Case) -> Row:
        return {
            "op": op_name,
            "provider": provider.name,
            "case": case.fields(),
            "case_name": case.name,
            "bytes": provider.traffic(case, self._workload.geometry),
        }

    def _measure(self, op_name: str, case: Case) -> list[Row]:
        op = self._ops[op_name]
        inputs = op.inputs(self._workload, case)
        rows, recordings = [], {}
        for provider in op.providers:
            row = self._head(op_name, provider, case)
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
                self._require_device(error)
        try:
            timings = self._timer.measure(recordings) if recordings else {}
        except RuntimeError as error:
            raise DeviceLostError(reason_of(error)) from error
        for row in rows:
            if row["status"] == MEASURED:
                row.update(self._result(row["bytes"], timings[row["provider"]]))
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

    def _require_device(self, error: Exception) -> None:
        """Errors inside kernels leave the device unusable; all others pass."""
        if self._workload.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._workload.device)
        except RuntimeError:
            raise DeviceLostError(reason_of(error)) from error

    def _result(self, num_bytes: int, timing: Timing) -> Row:
        shares = {
            kind: round(num_bytes / (spread.median_us * 1e-6) / self._bandwidth, 4)
            for kind, spread in (("cold", timing.cold), ("warm", timing.warm))
        }
        return {**timing.fields(), "share_of_read_bandwidth": shares}


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
