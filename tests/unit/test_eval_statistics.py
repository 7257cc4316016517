import math

import numpy as np
import pytest
from scipy import stats

from vllm_sparse_plugin.tools.eval import statistics
from vllm_sparse_plugin.tools.eval.statistics import estimate_difference, estimate_excess, estimate_mean


def test_wilson_interval_of_the_textbook():
    # Wilson's interval for 81 of 263 in Newcombe, Statistics in Medicine 17, 1998, table I.
    found = estimate_mean([1] * 81 + [0] * 182)
    assert (round(found.low, 4), round(found.high, 4), found.count) == (0.2553, 0.3662, 263)


@pytest.mark.parametrize(("right", "low", "high"), [(40, 0.9124, 1), (0, 0, 0.0876)])
def test_nothing_wrong_is_not_certainty(right, low, high):
    found = estimate_mean([1] * right + [0] * (40 - right))
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)


def test_one_graded_score_says_nothing_about_its_spread():
    found = estimate_mean([0.4])
    assert (found.value, found.low, found.high) == (0.4, -math.inf, math.inf)


def test_changed_answers_have_mcnemars_exact_test_and_the_interval_of_students_t():
    # 5 changes, all one way: 2 / 2**5.
    first, second = [1.0] * 19 + [0.0] * 22, [1.0] * 14 + [0.0] * 27
    found = estimate_difference(first, second)
    assert found.p_value == pytest.approx(2 / 32)
    expected = stats.ttest_rel(second, first).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    turned = estimate_difference(second, first)
    assert (turned.low, turned.high, turned.p_value) == (-found.high, -found.low, found.p_value)


def test_equal_answers_still_have_an_interval():
    found = estimate_difference([1] * 40, [1] * 40)
    assert (found.value, found.p_value) == (0, 1)
    assert (found.low, found.high) == (pytest.approx(-0.0876, abs=1e-4), pytest.approx(0.0876, abs=1e-4))


def test_graded_differences_are_paired():
    first = np.linspace(0, 0.8, 20)
    second = first + np.where(np.arange(20) % 2, 0.15, 0.05)
    found = estimate_difference(first.tolist(), second.tolist())
    assert found.value == pytest.approx(0.1)
    # The spread of the scores themselves is far larger.
    assert 0.07 < found.low < 0.1 < found.high < 0.13
    assert found.p_value < 0.001


def test_shares_that_are_all_equal_have_an_interval_of_their_positions():
    """The interval is neither that of independent prompts nor a single point."""
    coins, shares = estimate_mean([1.0] * 32), estimate_mean([1.0] * 32, positions=128)
    assert (coins.value, coins.high, shares.value, shares.high) == (1, 1, 1, 1)
    assert coins.low == pytest.approx(0.8928, abs=1e-4)
    # As of 256 answers.
    assert shares.low == pytest.approx(256 / (256 + 1.959964**2), abs=1e-6)
    half = estimate_mean([0.5] * 2, positions=64)
    assert half.low < 0.3 < 0.7 < half.high
    assert estimate_mean([1.0] * 3, positions=4).low == estimate_mean([1.0] * 3).low


def test_graded_scores_that_are_all_equal_are_not_certain():
    """A bootstrap of equal numbers is a point."""
    found = estimate_mean([0.5] * 20)
    assert (found.low, found.high) == (estimate_mean([1, 0] * 10).low, estimate_mean([1, 0] * 10).high)
    lost = estimate_difference([0.75] * 20, [0.25] * 20)
    assert -1 < lost.low < -0.55 < lost.value == -0.5 < -0.3 < lost.high < 0


def test_shares_of_likelihood_that_are_equal_and_above_one_have_an_interval():
    """A file may have a prompt twice. The likelihood of its text, as a share of dense attention's, can exceed 1."""
    found = estimate_mean([1.05] * 8, positions=128)
    assert found.value == pytest.approx(1.05)
    assert found.high - found.value == pytest.approx(found.value - found.low)
    assert found.value - found.low == pytest.approx(1 - estimate_mean([1.0] * 8, positions=128).low)


def test_shares_that_differ_are_resampled_even_where_each_is_all_or_nothing():
    shares = [1.0] * 30 + [0.0] * 2
    nearly = estimate_mean([*shares[:-1], 1e-9])
    assert estimate_mean(shares, positions=128).low == pytest.approx(nearly.low, abs=1e-6)
    assert abs(estimate_mean(shares).low - nearly.low) > 0.001
    assert estimate_mean([0.9], positions=128).low == -math.inf


def questions(rng: np.random.Generator, documents: int) -> np.ndarray:
    """Right and wrong answers to eight questions of each document, with mean .8 and a correlation of .2."""
    shares = rng.beta(0.8 * 4, 0.2 * 4, size=documents)
    return (rng.random((documents, 8)) < shares[:, None]).astype(float)


def coverage(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def test_intervals_cover_where_questions_share_documents(monkeypatch):
    monkeypatch.setattr(statistics, "_RESAMPLES", 19)
    rng, documents = np.random.default_rng(0), np.repeat(np.arange(15), 8).tolist()
    means, alone, differences = [], [], []
    for _ in range(600):
        before = questions(rng, 15)
        # In a document of its own kind more answers change: 15 % on average, of which 4 in 5 were right.
        after = np.where(rng.random(before.shape) < rng.beta(1.5, 8.5, size=15)[:, None], 1 - before, before)
        found = estimate_mean(before.ravel().tolist(), documents=documents)
        means.append(found.low <= 0.8 <= found.high)
        found = estimate_mean(before.ravel().tolist())
        alone.append(found.low <= 0.8 <= found.high)
        lost = estimate_difference(before.ravel().tolist(), after.ravel().tolist(), documents)
        differences.append(lost.low <= -0.15 * 0.6 <= lost.high)
    assert 0.93 <= coverage(means) <= 0.97
    assert 0.93 <= coverage(differences) <= 0.97
    assert coverage(alone) < 0.85


def test_documents_that_are_all_alike_are_not_certain():
    found = estimate_mean([1.0] * 24, documents=[i // 8 for i in range(24)])
    assert (found.low, found.count) == (estimate_mean([1.0] * 3).low, 24)
    same = estimate_difference([1.0] * 24, [1.0] * 24, [i // 8 for i in range(24)])
    assert (same.low, same.high) == pytest.approx((-same.high, 1 - found.low))
    assert estimate_mean([1.0, 0.0], documents="aa").low == -math.inf
    assert estimate_difference([1.0, 0.0], [1.0, 1.0], "aa").high == math.inf


def excess(rng: np.random.Generator, lost: float) -> tuple[list[float], list[float]]:
    """Of 128 tokens of 30 prompts, the shares that dense attention and some settings keep. Prompts differ."""
    noise = rng.beta(2, 72, size=30)
    more = rng.beta(2, 2 / lost - 2, size=30)
    return (1 - rng.binomial(128, noise) / 128).tolist(), (1 - rng.binomial(128, noise + more) / 128).tolist()


def test_intervals_of_the_excess_cover_and_seldom_pass_what_loses_too_much(monkeypatch):
    monkeypatch.setattr(statistics, "_RESAMPLES", 499)
    rng, hits, written = np.random.default_rng(0), [], []
    for _ in range(300):
        halves = [estimate_excess(*excess(rng, 0.012), 128) for _ in range(2)]
        hits += [found.low <= 0.012 <= found.high for found in halves]
        written.append(all(found.high <= 0.01 for found in halves))
    assert 0.93 <= coverage(hits) <= 0.97
    assert coverage(written) <= 0.01
