"""How far two runs over the same text are from each other, token by token: what perplexity and answers do not show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

ALTERNATIVES = 20
"""Tokens whose log probabilities are asked for at each position: the most that vLLM gives unless told otherwise."""
_LEAST = math.log(1e-3)
"""Log probability below which an alternative is not kept: all of them together would not change a share."""
_LEFT = 1e-6
"""Probability that a list leaves for other tokens at least: its values are rounded."""
Prediction = Mapping[int, float]
"""Log probabilities of the likeliest next tokens at one position, by token id."""


def keep_likely(prediction: Prediction) -> dict[int, float]:
    """Return the alternatives of a position that are worth a place in a file, the likeliest one always."""
    best = max(prediction, key=prediction.__getitem__)
    return {token: round(value, 4) for token, value in prediction.items() if value > _LEAST or token == best}


def agreement(first: Sequence[Prediction], second: Sequence[Prediction]) -> float:
    """Return the share of positions at which both runs have the same most likely next token."""
    same = [_best(one) == _best(other) for one, other in zip(first, second, strict=True)]
    return sum(same) / len(same)


def overlap(first: Sequence[Prediction], second: Sequence[Prediction]) -> float:
    """Return the mean overlap of the distributions; 1 for a run with itself.

        sum over tokens t of  min(p_t, q_t)  =  1 - total variation of p and q

    That is also the rate at which one run would accept tokens that the other has sampled as drafts. It is an
    approximation, see `_completed`.
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

    A file lists the likeliest tokens alone. The probability that a list leaves is shared equally by the tokens that
    only the other run lists and by the rest. None of these tokens gets more than an unlisted token can have: the
    probability of the 20th, or 0.001.
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
    # Of equally likely tokens the lowest, whatever the order in which they came.
    return min(prediction, key=lambda token: (-prediction[token], token))
