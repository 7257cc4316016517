"""95 % intervals for scores and for paired differences."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

_LEVEL = 0.95
_RESAMPLES = 9999
_SEED = 0
_ROUNDING = 1e-18
"""Squares of sums up to this are those of rounding."""
_POSITIONS = 16
"""Positions of a text that count as one independent answer, if scores do not show how positions depend on each other.
Counting each position would make the interval too narrow, counting the whole text too wide."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Difference(Estimate):
    """How much larger the mean of the second of two paired samples is."""

    p_value: float
    """p-value of a test for no difference."""


def estimate_mean(scores: Sequence[float], positions: int = 1, documents: Sequence[Hashable] | None = None) -> Estimate:
    """Estimate a mean: Wilson's interval where all scores are 0 or 1, else a bootstrap.

    One score other than 0 and 1 has no known spread: the interval is unbounded. Equal scores do not show their spread
    either, so they get Wilson's interval: no scores from 0 to 1 spread further than right and wrong answers. If they
    are shares of the positions of a text, the positions are converted to independent answers (see `_POSITIONS`).

    Args:
        scores: of independent items, from 0 to 1. Shares of likelihood can exceed 1.
        positions: minimum number of positions behind each share; 1 for scores that are not shares.
        documents: the document of each item, if items share documents. Then documents, not items, are independent.
    """
    count, mean = len(scores), sum(scores) / len(scores)
    if documents is not None and len(set(documents)) < count:
        return Estimate(mean, *_by_document(scores, documents), count)
    if count > 1 and max(scores) == min(scores):
        low, high = _wilson(min(mean, 1.0), count * max(positions // _POSITIONS, 1))
        return Estimate(mean, *((low, high) if mean <= 1 else (mean - (1 - low), mean + (1 - low))), count)
    if positions == 1 and all(score in (0, 1) for score in scores):
        return Estimate(mean, *_wilson(mean, count), count)
    return Estimate(mean, *_bootstrap(scores), count)


def estimate_difference(
    first: Sequence[float], second: Sequence[float], documents: Sequence[Hashable] | None = None
) -> Difference:
    """Estimate the mean of `second - first` over the same items, of scores from 0 to 1.

    Documents are independent, not items: Student's t of the documents' sums, and a permutation test of the signs of
    these sums, which is McNemar's exact test of right and wrong answers. Equal differences do not show their spread:
    they get Wilson's interval of the share of documents that differ otherwise, of which none was seen and each may gain
    or lose everything.

    Args:
        first: scores.
        second: scores of the same items.
        documents: the document of each item; None if each item has its own.
    """
    differences = [after - before for before, after in zip(first, second, strict=True)]
    documents = range(len(differences)) if documents is None else documents
    sums = _sums(differences, documents)
    count, mean = len(differences), sum(differences) / len(differences)
    if len(sums) < 2:
        return Difference(mean, -math.inf, math.inf, count, 1.0)
    if deviation := _deviation(differences, documents):
        reach = deviation * _reach(len(sums))
        return Difference(mean, max(mean - reach, -1.0), min(mean + reach, 1.0), count, _p_value(sums))
    _, others = _wilson(0.0, len(sums))
    low, high = mean - others * (1 + mean), mean + others * (1 - mean)
    return Difference(mean, low, high, count, _p_value(sums))


def estimate_amount_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Estimate the mean of `second - first` over the same items, of values that are not shares, such as nats: a paired
    bootstrap and a permutation test of the signs."""
    differences = [after - before for before, after in zip(first, second, strict=True)]
    found = estimate_amount(differences)
    return Difference(found.value, found.low, found.high, found.count, _p_value(differences))


def estimate_amount(values: Sequence[float]) -> Estimate:
    """Estimate a mean of values that are not shares, such as nats."""
    return Estimate(sum(values) / len(values), *_bootstrap(values), len(values))


def estimate_excess(own: Sequence[float], kept: Sequence[float], positions: int) -> Estimate:
    """Estimate the loss beyond that of the reference with itself: the mean of `own - kept`, paired.

    If all differences are equal, for example because nothing is lost, a bootstrap would report certainty. The interval
    is then that of the difference of two independent shares (Newcombe, Statistics in Medicine 17, 1998), with the
    positions converted to independent answers.

    Args:
        own: for each text, the share of positions that the reference keeps of itself.
        kept: for each text, the share that the other run keeps of the reference.
        positions: of the shortest text.
    """
    differences = [before - after for before, after in zip(own, kept, strict=True)]
    count = len(differences)
    if count < 2 or max(differences) > min(differences):
        return estimate_amount(differences)
    mean, (of_own, of_kept) = differences[0], (sum(own) / count, sum(kept) / count)
    # Shares of likelihood can exceed 1.
    bounds = [_wilson(min(share, 1.0), count * max(positions // _POSITIONS, 1)) for share in (of_own, of_kept)]
    (own_low, own_high), (kept_low, kept_high) = bounds
    low = math.hypot(of_own - own_low, kept_high - of_kept)
    high = math.hypot(own_high - of_own, of_kept - kept_low)
    return Estimate(mean, mean - low, mean + high, count)


def _by_document(scores: Sequence[float], documents: Sequence[Hashable]) -> tuple[float, float]:
    """Return the interval of a mean of scores from 0 to 1 whose documents are independent.

    Wilson's interval of the number of independent answers that would have the variance of the documents' sums, with
    Student's t in place of the normal quantile (Dean and Pagano, Journal of Survey Statistics and Methodology 3, 2015).
    Documents that are all alike do not show their spread: each counts as one answer.
    """
    mean, count = sum(scores) / len(scores), len(set(documents))
    deviation = _deviation(scores, documents)
    if count < 2:
        return -math.inf, math.inf
    if not deviation or not 0 < mean < 1:
        return _wilson(mean, count)
    normal = float(stats.norm.ppf((1 + _LEVEL) / 2))
    return _wilson(mean, min(mean * (1 - mean) / deviation**2 * (normal / _reach(count)) ** 2, len(scores)))


def _sums(values: Sequence[float], documents: Sequence[Hashable]) -> list[float]:
    """Return the sum of each document's values."""
    sums: dict[Hashable, float] = {}
    for value, document in zip(values, documents, strict=True):
        sums[document] = sums.get(document, 0.0) + value
    return list(sums.values())


def _deviation(values: Sequence[float], documents: Sequence[Hashable]) -> float:
    """Return the standard deviation of the mean of values whose documents are independent; 0 below 2 documents."""
    mean, count = sum(values) / len(values), len(set(documents))
    squares = sum(each**2 for each in _sums([value - mean for value in values], documents))
    return math.sqrt(count / max(count - 1, 1) * squares) / len(values) if squares > _ROUNDING else 0.0


def _reach(documents: int) -> float:
    """Return the quantile of Student's t of a mean over documents."""
    return float(stats.t.ppf((1 + _LEVEL) / 2, max(documents - 1, 1)))


def _wilson(share: float, count: float) -> tuple[float, float]:
    """Wilson's interval of a share of `count` answers, which need not be a whole number as in SciPy."""
    squared = float(stats.norm.ppf((1 + _LEVEL) / 2)) ** 2
    middle = (share + squared / (2 * count)) / (1 + squared / count)
    reach = math.sqrt(squared * share * (1 - share) / count + (squared / (2 * count)) ** 2) / (1 + squared / count)
    # Rounding must not exclude the share.
    return min(max(middle - reach, 0.0), share), max(min(middle + reach, 1.0), share)


def _p_value(differences: Sequence[float]) -> float:
    """Return the p-value of a permutation test of the signs. One difference tells nothing: both signs are as extreme.
    Zeros have no sign."""
    signed = np.array([difference for difference in differences if difference])
    if len(signed) < 2:
        return 1.0
    test = stats.permutation_test(
        (signed,), np.sum, permutation_type="samples", n_resamples=_RESAMPLES, rng=np.random.default_rng(_SEED)
    )
    return float(test.pvalue)


def _bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Bootstrap percentiles, expanded by Student's t: a bootstrap of few values is too narrow.

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
