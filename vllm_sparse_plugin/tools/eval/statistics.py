"""Intervals of 95 % for scores and for paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

_LEVEL = 0.95
_RESAMPLES = 9999
_SEED = 0
_POSITIONS = 16
"""Positions of a text that count as one independent answer where its score says nothing of how they depend on each
other. It is a choice between the two ends: each by itself would promise too much, a whole text as one too little."""


@dataclass(frozen=True)
class Estimate:
    """A mean with the interval that holds the true one with 95 % confidence."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Difference:
    """How much larger the mean of the second of two paired samples is."""

    value: float
    low: float
    high: float
    p_value: float
    """Of a test that there is no difference."""
    count: int


def estimate_mean(scores: Sequence[float], positions: int = 1) -> Estimate:
    """Estimate a mean: Wilson's interval where all scores are 0 or 1, else a bootstrap.

    One score that is neither says nothing about its spread: the interval is everything. Nor do scores that are all
    equal. Those that are shares of the positions of a text have Wilson's interval then, of as many answers as their
    positions stand for (see `_POSITIONS`).

    Args:
        scores: of items that are independent of each other.
        positions: of which each score is a share, at least; 1 for scores that are none.
    """
    count = len(scores)
    mean = sum(scores) / count
    if positions > 1 and count > 1 and max(scores) == min(scores):
        return Estimate(mean, *_wilson(mean, count * max(positions // _POSITIONS, 1)), count)
    if positions == 1 and _all_binary(scores):
        return Estimate(mean, *_wilson(mean, count), count)
    return Estimate(mean, *_bootstrap(scores), count)


def estimate_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Estimate the mean of `second - first` over the same items.

    Where all scores are 0 or 1: Newcombe's interval for paired proportions (Statistics in Medicine 17, 1998, method
    10) and McNemar's exact test. Else: a paired bootstrap and a permutation test of the signs.
    """
    differences = [after - before for before, after in zip(first, second, strict=True)]
    mean, count = sum(differences) / len(differences), len(differences)
    if _all_binary([*first, *second]):
        gained, lost = differences.count(1), differences.count(-1)
        p_value = float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
        return Difference(mean, *_newcombe(first, second), p_value, count)
    if not any(differences):
        return Difference(mean, *_bootstrap(differences), 1.0, count)
    test = stats.permutation_test(
        (np.array(differences),),
        np.mean,
        permutation_type="samples",
        n_resamples=_RESAMPLES,
        rng=np.random.default_rng(_SEED),
    )
    return Difference(mean, *_bootstrap(differences), float(test.pvalue), count)


def estimate_amount(values: Sequence[float]) -> Estimate:
    """Estimate a mean of values that are no shares, such as nats."""
    return Estimate(sum(values) / len(values), *_bootstrap(values), len(values))


def estimate_excess(own: Sequence[float], kept: Sequence[float], positions: int) -> Estimate:
    """Estimate how much more is lost than what the reference loses to itself: the mean of `own - kept`, paired.

    Where all of these differences are equal, as where every prompt is kept whole, a bootstrap would call that certain.
    The interval is then that of the difference of two independent shares (Newcombe, Statistics in Medicine 17, 1998),
    of as many answers as the positions stand for.

    Args:
        own: of each text, the share of its positions that the reference keeps of itself.
        kept: the share that is kept of the reference.
        positions: of the shortest text.
    """
    differences = [before - after for before, after in zip(own, kept, strict=True)]
    count = len(differences)
    if count < 2 or max(differences) > min(differences):
        return estimate_amount(differences)
    mean, (of_own, of_kept) = differences[0], (sum(own) / count, sum(kept) / count)
    # Shares of likelihood may be above 1.
    bounds = [_wilson(min(share, 1.0), count * max(positions // _POSITIONS, 1)) for share in (of_own, of_kept)]
    (own_low, own_high), (kept_low, kept_high) = bounds
    low = math.hypot(of_own - own_low, kept_high - of_kept)
    high = math.hypot(own_high - of_own, of_kept - kept_low)
    return Estimate(mean, mean - low, mean + high, count)


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's interval of a share of `count` answers."""
    squared = float(stats.norm.ppf((1 + _LEVEL) / 2)) ** 2
    middle = (share + squared / (2 * count)) / (1 + squared / count)
    reach = math.sqrt(squared * share * (1 - share) / count + (squared / (2 * count)) ** 2) / (1 + squared / count)
    # Rounding must not leave the share itself out.
    return min(max(middle - reach, 0.0), share), max(min(middle + reach, 1.0), share)


def _all_binary(scores: Sequence[float]) -> bool:
    return all(score in (0, 1) for score in scores)


def _bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Percentiles, expanded as Student's t demands: a bootstrap of few values is too narrow otherwise.

    Hesterberg, What Teachers Should Know About the Bootstrap, The American Statistician 69, 2015.
    """
    count = len(values)
    if count < 2:
        return -math.inf, math.inf
    reach = math.sqrt(count / (count - 1)) * stats.t.ppf((1 + _LEVEL) / 2, count - 1)
    found = stats.bootstrap(
        (np.array(values),),
        np.mean,
        confidence_level=1 - 2 * stats.norm.sf(reach),
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def _newcombe(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The interval of `second - first`: both Wilson intervals, combined with the correlation of the answers."""
    before, after = estimate_mean(first), estimate_mean(second)
    count = len(first)
    both = sum(a * b for a, b in zip(first, second, strict=True))
    right, also = sum(first), sum(second)
    neither = count - right - also + both
    margins = right * (count - right) * also * (count - also)
    covariance = both * neither - (right - both) * (also - both)
    if covariance > 0:
        covariance = max(covariance - count / 2, 0)
    phi = covariance / math.sqrt(margins) if margins else 0.0
    down, up = after.value - after.low, before.high - before.value
    low = math.sqrt(max(down**2 - 2 * phi * down * up + up**2, 0))
    down, up = before.value - before.low, after.high - after.value
    high = math.sqrt(max(up**2 - 2 * phi * up * down + down**2, 0))
    mean = after.value - before.value
    return mean - low, mean + high
