"""What settings keep of dense attention, beside what dense attention keeps of itself.

Dense attention in 16 bits does not repeat itself: another batch, another chunk of the prefill or another kernel adds
the same numbers in another order. A second run of dense attention, in other batches, measures this noise. The excess is
what a setting loses beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_sparse_plugin.tools.eval.fidelity import agreement, divergence, overlap
from vllm_sparse_plugin.tools.eval.results import Result
from vllm_sparse_plugin.tools.eval.statistics import Estimate, estimate_amount, estimate_excess, estimate_mean

_OTHER_CHUNK, _OTHER_REQUESTS = 480, 5
"""Tokens of a step and requests at a time of runs in other batches: no power of two, and no multiple of usual ones."""
_SLOTS = 16
"""Requests of such an engine at most; vLLM takes no more of them than tokens of a step."""


class Measure(NamedTuple):
    """A way to compare a run with dense attention on one text."""

    heading: str
    of: Callable[[Result, Result], float]
    """Takes the result of dense attention and another one of the same text."""
    is_share: bool = True
    """Whether it is what is kept, 1 being everything; else a loss in nats, 0 being none."""


MEASURES: Mapping[str, Measure] = {
    "agreement": Measure(
        "same most likely token", lambda dense, other: agreement(dense.predictions, other.predictions)
    ),
    "overlap": Measure(
        "overlap of the distributions", lambda dense, other: overlap(dense.predictions, other.predictions)
    ),
    "likelihood": Measure(
        "likelihood of the text, per token", lambda dense, other: math.exp(dense.score - other.score)
    ),
    "nll": Measure("mean negative log likelihood, more nats", lambda dense, other: other.score - dense.score, False),
    "kl": Measure(
        "Kullback-Leibler divergence, nats",
        lambda dense, other: divergence(dense.predictions, other.predictions), False,
    ),
}  # fmt: skip
"""By name."""
SHARES = tuple(name for name, measure in MEASURES.items() if measure.is_share)
"""Measures that settings can be chosen by."""


@dataclass(frozen=True)
class Beside:
    """One measure of a run beside dense attention, with intervals of 95 % over texts."""

    found: Estimate
    own: Estimate | None
    """Of dense attention beside itself; None where that was not measured."""
    excess: Estimate | None
    """How much more is lost than by dense attention itself, paired; below 0 where less is."""


def beside(name: str, dense: Sequence[Result], other: Sequence[Result], again: Sequence[Result] | None) -> Beside:
    """Compare results by a measure.

    Args:
        name: one of `MEASURES`.
        dense: results of dense attention.
        other: those of the run to judge, of the same texts in the same order.
        again: those of dense attention in other batches; None if there are none.
    """
    measure = MEASURES[name]
    least = max(min(len(result.predictions) for result in (*dense, *other)), 2)

    def of(results: Sequence[Result]) -> list[float]:
        return [measure.of(*pair) for pair in zip(dense, results, strict=True)]

    def estimate(values: Sequence[float]) -> Estimate:
        return estimate_mean(values, least) if measure.is_share else estimate_amount(values)

    found = of(other)
    if again is None:
        return Beside(estimate(found), None, None)
    own = of(again)
    if measure.is_share:
        excess = estimate_excess(own, found, least)
    else:
        excess = estimate_amount([after - before for before, after in zip(own, found, strict=True)])
    return Beside(estimate(found), estimate(own), excess)


def in_other_batches(arguments: Mapping[str, Any], concurrency: int) -> tuple[dict[str, Any], int]:
    """Return arguments of an engine, and requests at a time, under which its sums run in another order.

    On a CPU and on a GPU another chunk of the prefill changes the shapes of all matrix products, and so the bits of all
    keys and values. More requests at a time do the same for decode steps.

    Args:
        arguments: of `vllm.LLM`, as for the first run.
        concurrency: requests at a time of the first run.
    """
    chunk = _OTHER_CHUNK if arguments.get("max_num_batched_tokens") != _OTHER_CHUNK else _OTHER_CHUNK - 128
    given = arguments.get("max_num_seqs")
    slots = min(given, _SLOTS) if isinstance(given, int) else _SLOTS
    other = _OTHER_REQUESTS if concurrency != _OTHER_REQUESTS else _OTHER_REQUESTS - 2
    return {**arguments, "max_num_batched_tokens": chunk, "max_num_seqs": slots}, other
