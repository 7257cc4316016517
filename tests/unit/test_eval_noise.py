"""What settings lose beyond what dense attention loses to itself, by numbers that no engine made."""

import math
import random

import pytest

from vllm_sparse_plugin.tools.eval.fidelity import divergence, keep_likely, overlap
from vllm_sparse_plugin.tools.eval.noise import MEASURES, beside, in_other_batches
from vllm_sparse_plugin.tools.eval.results import Result
from vllm_sparse_plugin.tools.eval.statistics import estimate_excess

HALF = math.log(0.5)


def distribution(draw: random.Random, tokens: int, skew: float) -> list[float]:
    weights = [math.exp(skew * draw.gauss(0, 1)) for _ in range(tokens)]
    return [weight / sum(weights) for weight in weights]


def listed(probabilities: list[float]) -> dict[int, float]:
    """The twenty likeliest, as a file has them."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[:20]
    return keep_likely({token: math.log(probabilities[token]) for token in order})


@pytest.mark.parametrize("skew", [0.1, 1, 3])
def test_a_run_is_the_same_as_itself_whatever_its_lists_leave_out(skew):
    draw = random.Random(1)
    run = [listed(distribution(draw, 1000, skew)) for _ in range(10)]
    assert min(sum(map(math.exp, at.values())) for at in run) < 0.99
    assert overlap(run, run) == pytest.approx(1)
    assert divergence(run, run) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("skew", [1, 2, 3])
def test_short_lists_say_nearly_what_whole_distributions_say(skew):
    draw = random.Random(2)
    for _ in range(20):
        one = distribution(draw, 500, skew)
        weights = [value * math.exp(0.3 * draw.gauss(0, 1)) for value in one]
        other = [value / sum(weights) for value in weights]
        exact = sum(map(min, one, other))
        nats = sum(p * math.log(p / q) for p, q in zip(one, other, strict=True))
        found = divergence([listed(one)], [listed(other)])
        assert overlap([listed(one)], [listed(other)]) == pytest.approx(exact, abs=0.12)
        assert 0 <= found == pytest.approx(nats, abs=0.05)


def test_the_excess_is_paired():
    """Texts differ much more than the settings do: by .05 to .15 each."""
    draw = random.Random(3)
    own = [draw.uniform(0.6, 1) for _ in range(24)]
    kept = [share - draw.uniform(0.005, 0.015) for share in own]
    found = estimate_excess(own, kept, 100)
    assert found.value == pytest.approx(sum(own) / 24 - sum(kept) / 24)
    assert 0.007 < found.low < found.value < found.high < 0.013


def result(same: int, score: float, positions: int = 10) -> Result:
    """A text of ten positions, at so many of which the likeliest token is 1."""
    likely, unlikely = math.log(0.75), math.log(0.25)
    predictions = [{1: likely, 2: unlikely} if at < same else {1: unlikely, 2: likely} for at in range(positions)]
    return Result(
        id="x", task="completion", context_tokens=1, prompt_tokens=1, forced_tokens=positions, digest="0", answers=(),
        completion="", metric="nll", score=score, seconds=0.0, predictions=tuple(predictions),
    )  # fmt: skip


def test_every_measure_has_its_own_noise_and_an_excess():
    dense = [result(10, 1.0), result(10, 2.0), result(10, 3.0)]
    again = [result(9, 1.01), result(10, 2.0), result(9, 3.02)]
    other = [result(8, 1.1), result(9, 2.05), result(9, 3.0)]
    found = {name: beside(name, dense, other, again) for name in MEASURES}
    one = found["agreement"]
    assert [each.value for each in (one.found, one.own, one.excess)] == pytest.approx([26 / 30, 28 / 30, 2 / 30])
    one = found["nll"]
    assert [each.value for each in (one.found, one.own, one.excess)] == pytest.approx([0.05, 0.01, 0.04])
    assert found["overlap"].excess.value == pytest.approx(0.5 * 2 / 30)
    assert found["kl"].excess.value == pytest.approx(0.5 * math.log(3) * 2 / 30, abs=1e-3)
    assert all(each.excess.low <= each.excess.value <= each.excess.high for each in found.values())
    alone = beside("agreement", dense, other, None)
    assert (alone.found, alone.own, alone.excess) == (found["agreement"].found, None, None)


def test_other_batches_are_other_than_those_of_the_first_run():
    assert in_other_batches({}, 1) == ({"max_num_batched_tokens": 480, "max_num_seqs": 16}, 5)
    given = {"max_num_batched_tokens": 480, "max_num_seqs": 4, "dtype": "bfloat16"}
    arguments, requests = in_other_batches(given, 5)
    assert arguments == {"max_num_batched_tokens": 352, "max_num_seqs": 4, "dtype": "bfloat16"}
    assert requests != 5
