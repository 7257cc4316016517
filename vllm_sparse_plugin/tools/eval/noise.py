"""Loss of settings against dense attention, beside the noise of dense attention.

Dense attention in 16 bits is not reproducible: another batch, prefill chunk or kernel adds the same numbers in another
order. A second run of dense attention in other batches measures this noise. The excess is the loss of a setting beyond
the noise.
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
"""Tokens of a step and concurrency of runs in other batches: unlike powers of two and the usual multiples."""
_SLOTS = 16
"""Maximum requests of such an engine. vLLM does not accept more requests than tokens of a step."""


class Measure(NamedTuple):
    """A way to compare a run with dense attention on one text."""

    heading: str
    of: Callable[[Result, Result], float]
    """Takes the result of dense attention and another result of the same text."""
    is_share: bool = True
    """True for a kept share: 1 means no loss. False for a loss in nats: 0 means no loss."""


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
"""Measures that `tune` can choose settings by."""


@dataclass(frozen=True)
class Beside:
    """One measure of a run compared with dense attention, with 95 % intervals over texts."""

    found: Estimate
    own: Estimate | None
    """Dense attention compared with itself; None if not measured."""
    excess: Estimate | None
    """Paired loss beyond that of dense attention with itself; negative if smaller."""


def beside(name: str, dense: Sequence[Result], other: Sequence[Result], again: Sequence[Result] | None) -> Beside:
    """Compare results by a measure.

    Args:
        name: one of `MEASURES`.
        dense: results of dense attention.
        other: results of the run to judge, same texts in the same order.
        again: results of dense attention in other batches; None without such a run.
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
    repeated = of(again)
    if measure.is_share:
        excess = estimate_excess(repeated, found, least)
    else:
        excess = estimate_amount([after - before for before, after in zip(repeated, found, strict=True)])
    return Beside(estimate(found), estimate(repeated), excess)


def in_other_batches(arguments: Mapping[str, Any], concurrency: int) -> tuple[dict[str, Any], int]:
    """Return arguments of an engine and a concurrency that change the order of sums.

    Another prefill chunk changes the shapes of all matrix products, and so the bits of all keys and values, on a CPU
    and on a GPU. Another concurrency does the same for decode steps.

    Args:
        arguments: of `vllm.LLM`, as in the first run.
        concurrency: of the first run.
    """
    chunk = _OTHER_CHUNK if arguments.get("max_num_batched_tokens") != _OTHER_CHUNK else _OTHER_CHUNK - 128
    most_requests = arguments.get("max_num_seqs")
    slots = min(most_requests, _SLOTS) if isinstance(most_requests, int) else _SLOTS
    other = _OTHER_REQUESTS if concurrency != _OTHER_REQUESTS else _OTHER_REQUESTS - 2
    return {**arguments, "max_num_batched_tokens": chunk, "max_num_seqs": slots}, other
