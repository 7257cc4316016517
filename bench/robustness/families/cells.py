"""The outcome of a family with one way of attention: a cell of the support matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from bench.common.results import Row
from vllm_sparse_plugin.errors import ConfigurationError

OK, REFUSED, NOT_SERVED, FAILED = "ok", "refused", "not served", "failed"
_LONGEST_REASON = 300


@dataclass(frozen=True)
class Cell:
    """One family with one way of attention."""

    family: str
    way: str
    status: str
    """`ok`, `refused` by the plugin, `not served` by vLLM itself, or `failed`."""
    reason: str = ""
    """Reason of the status; empty for `ok`."""
    logprob_error: float | None = None
    """Largest difference of a log probability from dense attention, for contexts within the budget."""
    judged_steps: int | None = None
    """Number of attention calls that were compared with the reference pipeline."""
    output_error: float | None = None
    """Largest error of a head's output against the reference, relative to its norm."""
    distinct_tokens: int | None = None
    """Number of different tokens that dense attention decodes. With few, the test is weak."""

    def as_row(self) -> Row:
        """Returns the cell as a line of a result file."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def with_faults(self, faults: list[str]) -> Cell:
        """Returns the cell, failed if there are faults."""
        return replace(self, status=FAILED, reason="; ".join(faults)) if faults else self


def unless_raised(cell: Cell, serve: Callable[[], Cell], serve_densely: Callable[[], object]) -> Cell:
    """Returns the result of `serve`, or a failed cell. It is the plugin's failure if `serve_densely` raises nothing."""
    try:
        return serve()
    except Exception as error:  # vLLM may raise anything
        if refusal := refusal_of(error):
            return replace(cell, status=REFUSED, reason=refusal)
        try:
            serve_densely()
        except Exception as dense_error:
            return replace(cell, status=NOT_SERVED, reason=sentence(dense_error))
        return replace(cell, status=FAILED, reason=sentence(error))


def refusal_of(error: BaseException | None) -> str:
    """Returns the plugin's sentence if it refused the engine; else an empty text."""
    while error is not None:
        if isinstance(error, ConfigurationError):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""


def sentence(error: BaseException) -> str:
    """Returns the first line of an exception's message, or of its first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:_LONGEST_REASON]
