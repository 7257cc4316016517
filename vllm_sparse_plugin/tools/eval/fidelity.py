"""Distance of two runs over the same text, token by token. Perplexity and answers do not show it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

ALTERNATIVES = 20
"""Log probabilities requested per position: vLLM's default maximum."""
_LEAST = math.log(1e-3)
"""Alternatives with a lower log probability are not kept: together they would not change a share."""
_LEFT = 1e-6
"""Minimum probability for tokens outside a list, because its values are rounded."""
Prediction = Mapping[int, float]
"""Log probabilities of the likeliest next tokens at one position, by token id."""


def keep_likely(prediction: Prediction) -> dict[int, float]:
    """Return the alternatives worth storing, always including the likeliest one."""
    best = max(prediction, key=prediction.__getitem__)
    return {token: round(value, 4) for token, value in prediction.items() if value > _LEAST or token == best}


def agreement(first: Sequence[Prediction], second: Sequence[Prediction]) -> float:
    """Return the share of positions where both runs have the same likeliest next token."""
    same = [_best(one) == _best(other) for one, other in zip(first, second, strict=True)]
    return sum(same) / len(same)


def overlap(first: Sequence[Prediction], second: Sequence[Prediction]) -> float:
    """Return the mean overlap of the distributions; 1 for a run with itself.

        sum over tokens t of  min(p_t, q_t)  =  1 - total variation of p and q

    This equals the rate at which one run accepts tokens that the other samples as drafts. It is an approximation, see
    `_completed`.
    """
    shared = [
        sum(map(min, *_completed(one, other))) for one, other in zip(first, second, strict=True)
    ]  # fmt: skip
    return sum(shared) / len(shared)


def divergence(first: Sequence[Prediction], second: Sequence[Prediction]) -> float:
    """Return the mean Kullback-Leibler divergence of the second run's distributions from the first's, in nats.

        sum over tokens t of  p_t log(p_t / q_t)

    It is 0 for a run with itself. It is an approximation, see `_completed`.
    """
    nats = [
        sum(p * math.log(p / q) for p, q in zip(*_completed(one, other), strict=True))
        for one, other in zip(first, second, strict=True)
    ]
    return sum(nats) / len(nats)


def _completed(one: Prediction, other: Prediction) -> tuple[list[float], list[float]]:
    """Return both distributions over the same outcomes: each token that either run lists, and all others as one.

    A file lists only the likeliest tokens. The remaining probability of a list is shared equally by the tokens that
    only the other run lists and by the rest. Each of these tokens gets at most the largest probability of an unlisted
    token: that of the 20th, or 0.001.
    """
    tokens = sorted({*one, *other})

    def complete(prediction: Prediction) -> list[float]:
        known = {token: math.exp(value) for token, value in prediction.items()}
        left = max(1 - sum(known.values()), _LEFT)
        missing = len(tokens) - len(known)
        ranked = sorted(known.values(), reverse=True)
        most = ranked[ALTERNATIVES - 1] if len(ranked) >= ALTERNATIVES else math.exp(_LEAST)
        each = min(most, left / (missing + 1))
        found = [*(known.get(token, each) for token in tokens), left - missing * each]
        total = sum(found)
        return [value / total for value in found]

    return complete(one), complete(other)


def _best(prediction: Prediction) -> int:
    # Ties go to the lowest token id, independent of the order.
    return min(prediction, key=lambda token: (-prediction[token], token))
