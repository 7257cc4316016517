"""The row of a storm, and the checks that it failed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bench.common.continuations import LOGPROB_TOLERANCE
from bench.common.results import Row
from bench.robustness.storm.ending import End, Idle
from bench.robustness.storm.load import NO_ANSWER, Phase


def allowed_gap(quiet: Sequence[Phase]) -> float:
    """The difference in nats between two tokens up to which rounding explains a changed answer: the largest one without
    hostile clients, at least that of another order of summation."""
    return max([LOGPROB_TOLERANCE, *(gap for phase in quiet for gap in phase.gaps if math.isfinite(gap))])


def phase_columns(phase: Phase, allowed: float) -> Row:
    """Columns of a phase: its answers, and its time per token in milliseconds."""
    times, largest = phase.ms_per_token, max([0.0, *phase.gaps])
    return {
        "seconds": phase.seconds,
        "answers": len(times),
        "changed": len(phase.gaps),
        "changed_too_far": too_far(phase, allowed),
        "largest_gap": round(largest, 4) if math.isfinite(largest) else None,
        "ms_per_token_median": round(statistics.median(times), 3) if times else None,
        "ms_per_token_p99": round(p99(times), 3) if times else None,
    }


def too_far(phase: Phase, allowed: float) -> int:
    """The answers that changed by more than is allowed."""
    return sum(gap > allowed for gap in phase.gaps)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=100, method="inclusive")[-1]


def ratios(quiet: Phase, storm: Phase) -> Row:
    """Time per token in a storm relative to that without hostile clients; empty if a phase has no answer."""
    before, during = quiet.ms_per_token, storm.ms_per_token
    if not before or not during:
        return {}
    return {
        "ratio_median": round(statistics.median(during) / statistics.median(before), 3),
        "ratio_p99": round(p99(during) / p99(before), 3),
    }


def faults_of_phases(
    phases: Sequence[Phase], allowed: float, preemptions: int, hostile: Row, slowest: float, own_kinds: tuple[str, ...]
) -> list[str]:
    """The failed checks of all phases, one sentence each.

    A preempted request attends to its own output densely when it resumes, so its answer may change: each preemption
    excuses one changed answer. vLLM itself answers 500 for some requests, such as grammars that cannot be compiled.

    Args:
        phases: two quiet ones, the storm, and the end with one request.
        allowed: the result of `allowed_gap`.
        preemptions: of requests during the storm.
        hostile: the columns of the hostile clients.
        slowest: largest allowed ratio of the median times per token.
        own_kinds: kinds of hostile requests whose refusals are the plugin's; a server's error is a fault for these.
    """
    _, quiet, storm, _ = phases
    faults = []
    for phase in phases:
        faults += [f"{phase.name}: {failure}" for failure in dict.fromkeys(phase.failures)]
        if not phase.ms_per_token:
            faults.append(f"{phase.name}: no well-behaved request was answered")
    if (changed := too_far(storm, allowed)) > preemptions:
        faults.append(f"storm: {changed} answers changed by more than rounding, {preemptions} requests were preempted")
    ratio = ratios(quiet, storm).get("ratio_median", 0)
    if ratio > slowest:
        faults.append(f"storm: the median time per token is {ratio:.2f} times that without it, allowed: {slowest:g}")
    faults += [
        f"storm: a hostile request got {status}: {request}"
        for request, status in hostile["failed"].items()
        if status == NO_ANSWER or request.startswith(own_kinds)
    ]
    return faults


def faults_of_end(before: Idle, after: Idle | None, code: int | None, end: End) -> list[str]:
    """The failed checks after a storm, one sentence each.

    Args:
        before: the idle server before all requests.
        after: the idle server after them; None if it does not answer.
        code: the status of `/health`.
        end: the end by SIGTERM.
    """
    faults = []
    if after is None:
        faults.append("end: the server does not answer")
    else:
        if after.running or after.waiting:
            faults.append(f"end: {after.running} requests run and {after.waiting} wait")
        if leaked := after.used_blocks - before.used_blocks:
            faults.append(f"end: {leaked} of {after.blocks} blocks are in use without requests")
    if code != 200:
        faults.append(f"end: /health answers {code}")
    if end.left:
        faults.append(f"end: SIGTERM leaves {', '.join(end.left)} after {end.seconds:.0f} seconds")
    return faults
