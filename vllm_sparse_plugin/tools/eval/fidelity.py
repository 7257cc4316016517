"""How far two runs over the same text are from each other, token by token: what perplexity and answers do not show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

ALTERNATIVES = 20
"""Tokens whose log probabilities are asked for at each position: the most that vLLM gives unless told otherwise."""
_LEAST = math.log(1e-3)
"""Log probability below which an alternative is not kept: all of them together would not change a share."""
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
    """Return the mean overlap of the distributions, of what is known of them: a lower bound.

        sum over tokens t of  min(p_t, q_t)  =  1 - total variation of p and q

    That is also the rate at which one run would accept tokens that the other has sampled as drafts.
    """
    shared = [
        sum(math.exp(min(value, other[token])) for token, value in one.items() if token in other)
        for one, other in zip(first, second, strict=True)
    ]
    return sum(shared) / len(shared)


def _best(prediction: Prediction) -> int:
    # Of equally likely tokens the lowest, whatever the order in which they came.
    return min(prediction, key=lambda token: (-prediction[token], token))
