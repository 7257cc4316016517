"""Draft lengths in adaptive lossless mode: the length with the best measured speed."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from vllm_sparse_plugin.config import DraftRule
from vllm_sparse_plugin.lossless.drafter import PaceWatch, SparseDrafter
from vllm_sparse_plugin.lossless.pace import DraftPace, Load
from vllm_sparse_plugin.metrics import live

MOST = 8
SMALL, LARGE = Load.of([4000]), Load.of([4000] * 24)
MODELS = {
    "drafts cost what steps cost": (0.99, 1.0, 0),
    "drafts are nearly free and right": (0.99, 0.01, 8),
    "drafts are cheap and often wrong": (0.5, 0.1, 2),
    "drafts are never right": (0.0, 0.1, 0),
}
"""Acceptance of a draft, seconds of a draft where a step takes one, and the best length."""


def rate(acceptance: float, cost: float, drafts: int) -> float:
    return sum(acceptance**place for place in range(drafts + 1)) / (1 + cost * drafts)


class Engine:
    """Steps of one request with the times and acceptances of a model."""

    def __init__(self) -> None:
        self.pace = DraftPace(range(MOST + 1))
        self.rng = random.Random(0)

    def run(
        self, acceptance: float, cost: float, steps: int, load: Load = SMALL, dense: float = 1.0
    ) -> tuple[Counter[int], float]:
        """Returns how often each draft length was used, and tokens per second."""
        lengths, tokens, seconds = Counter(), 0, 0.0
        for _ in range(steps):
            drafts = self.pace.choose(load)
            accepted = next((i for i in range(drafts) if self.rng.random() >= acceptance), drafts)
            took = (dense + cost * drafts) * self.rng.uniform(0.9, 1.1)
            self.pace.observe_drafts(drafts, accepted)
            self.pace.observe_step(drafts, took, load)
            lengths[drafts] += 1
            tokens, seconds = tokens + accepted + 1, seconds + took
        return lengths, tokens / seconds


@pytest.mark.parametrize("name", MODELS)
def test_the_best_length_is_found_and_looking_for_it_costs_little(name):
    acceptance, cost, best = MODELS[name]
    assert max(range(MOST + 1), key=lambda drafts: rate(acceptance, cost, drafts)) == best
    engine = Engine()
    engine.run(acceptance, cost, 150)
    lengths, reached = engine.run(acceptance, cost, 3000)
    assert reached > 0.96 * rate(acceptance, cost, best)
    assert engine.pace.gain(SMALL) == pytest.approx(rate(acceptance, cost, best), rel=0.2)
    # It continues to try the other end.
    assert lengths[MOST if best < MOST else 0] >= 3


def test_the_length_follows_the_text():
    engine = Engine()
    engine.run(0.99, 0.05, 200)
    assert engine.pace.best(SMALL) == MOST
    engine.run(0.1, 0.05, 200)
    assert engine.pace.best(SMALL) <= 2
    engine.run(0.99, 0.05, 400)
    assert engine.pace.best(SMALL) == MOST


def test_what_a_large_load_took_says_nothing_about_a_small_one():
    engine = Engine()
    # Dense steps of 24 long contexts are slow, so the longest drafts pay off. A single context has fast steps.
    engine.run(0.9, 1.0, 200, LARGE, dense=5.0)
    assert engine.pace.best(LARGE) >= 4
    lengths, _ = engine.run(0.9, 1.0, 40, SMALL, dense=1.6)
    assert engine.pace.best(SMALL) in (2, 3)
    assert lengths.most_common(1)[0][0] in (2, 3)
    assert engine.pace.best(LARGE) >= 4


def test_a_first_step_that_was_held_up_is_forgotten():
    engine = Engine()
    engine.pace.observe_step(0, 100.0, SMALL)
    engine.run(0.9, 1.0, 30)
    assert engine.pace.best(SMALL) <= 3


def test_a_context_that_doubles_goes_on_from_what_is_known():
    engine = Engine()
    engine.run(0.99, 0.01, 40)
    lengths, _ = engine.run(0.99, 0.01, 10, Load.of([8000]))
    assert lengths[MOST] >= 9


def test_a_load_that_shrinks_takes_its_times_along():
    engine = Engine()
    engine.run(0.9, 0.5, 40, LARGE, dense=4.0)
    before = engine.pace.gain(LARGE)
    half = Load.of([4000] * 12)
    assert engine.pace.gain(half) == pytest.approx(before)
    # Its first step took half the time, so all steps are assumed to.
    engine.pace.observe_step(MOST, 4.0, half)
    assert engine.pace.gain(half) == pytest.approx(before)
    assert engine.pace.gain(LARGE) == pytest.approx(before)


def test_a_load_whose_first_step_was_held_up_is_not_taken_to_be_as_slow():
    engine = Engine()
    engine.run(0.99, 0.1, 200, LARGE)
    half = Load.of([4000] * 12)
    engine.pace.observe_step(engine.pace.choose(half), 100.0, half)
    # Drafts no longer pay off. A step without drafts is assumed to take three times as long.
    engine.run(0.1, 0.6, 300, half)
    assert engine.pace.best(half) == 0


def test_steps_that_nobody_timed_are_no_looks():
    engine = Engine()
    for _ in range(41):
        # Prompts are computed in all of them.
        engine.pace.choose(SMALL)
    engine.pace.observe_step(0, 100.0, SMALL)
    engine.run(0.1, 0.6, 30)
    assert engine.pace.best(SMALL) == 0


def test_times_that_a_load_begins_with_are_those_of_one_that_has_some():
    engine = Engine()
    engine.run(0.99, 0.01, 40)
    for _ in range(100):
        engine.pace.choose(Load.of([16000]))
    assert engine.pace.gain(Load.of([8000])) == pytest.approx(engine.pace.gain(SMALL))


def test_a_load_that_nobody_timed_takes_the_times_of_one_that_came_after_it():
    engine = Engine()
    later = Load.of([8000])
    for _ in range(100):
        engine.pace.choose(later)
    engine.run(0.99, 0.01, 40)
    assert {engine.pace.choose(later) for _ in range(10)} == {MOST}
    assert engine.pace.gain(later) == pytest.approx(engine.pace.gain(SMALL))


def test_a_load_is_a_matter_of_requests_and_tokens():
    assert Load.of([4000] * 5) == Load.of([4100] * 7)
    assert Load.of([4000] * 7) != Load.of([3500] * 8)
    assert Load.of([4000]) != Load.of([8200])


def test_a_step_that_was_held_up_changes_little():
    engine = Engine()
    engine.run(0.95, 0.02, 200)
    before = engine.pace.gain(SMALL)
    engine.pace.observe_step(MOST, 1000.0, SMALL)
    assert engine.pace.gain(SMALL) > before / 2


def test_nothing_is_known_before_two_lengths_are():
    pace = DraftPace(range(MOST + 1))
    pace.observe_step(MOST, 1.0, SMALL)
    assert (pace.best(SMALL), pace.gain(SMALL)) == (MOST, 1.0)


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(live, "record_gain", lambda gain: None)
    watch = PaceWatch(MOST)
    watch.seen = []
    monkeypatch.setattr(
        watch.pace, "observe_step", lambda drafts, seconds, load: watch.seen.append(("step", drafts, seconds, load))
    )
    monkeypatch.setattr(watch.pace, "observe_drafts", lambda drafts, accepted: watch.seen.append((drafts, accepted)))
    monkeypatch.setattr(watch.pace, "choose", lambda load: 4)
    return watch


def test_a_step_of_the_same_requests_is_measured(watch):
    assert watch.step({"a": 1, "b": 1}, [8, 8], SMALL, 1.0) == [4, 4]
    assert watch.seen == []
    assert watch.step({"b": 5, "a": 2}, [8, 3], SMALL, 3.5) == [4, 3]
    assert watch.seen == [(4, 1), (4, 4), ("step", 4, 2.5, SMALL)]


@pytest.mark.parametrize(
    "made", [{"a": 3}, {"a": 3, "b": 0}, {"a": 3, "b": 2, "c": 1}, {"a": 3, "c": 2}], ids=lambda made: str(made)
)
def test_steps_with_prompts_in_them_say_nothing_about_time(watch, made):
    watch.step({"a": 1, "b": 1}, [8, 8], SMALL, 1.0)
    watch.step(made, [8] * len(made), SMALL, 2.0)
    assert (4, 2) in watch.seen
    assert all(len(each) == 2 for each in watch.seen)


def test_requests_with_drafts_of_different_lengths_say_nothing_about_time(watch):
    watch.step({"a": 1, "b": 1}, [8, 2], SMALL, 1.0)
    watch.step({"a": 3, "b": 2}, [8, 8], SMALL, 2.0)
    assert watch.seen == [(4, 2), (2, 1)]


def test_contexts_too_short_to_draft_for_say_nothing(watch):
    assert watch.step({"a": 1}, [0], SMALL, 1.0) == [0]
    assert watch.step({"a": 1}, [8], SMALL, 2.0) == [4]
    assert watch.seen == []


def test_requests_that_are_not_drafted_for_are_part_of_a_step_that_is_measured(watch):
    assert watch.step({"a": 1, "short": 1}, [8, 0], SMALL, 1.0) == [4, 0]
    watch.step({"a": 3, "short": 1}, [8, 0], SMALL, 2.0)
    assert watch.seen == [(4, 2), ("step", 4, 1.0, SMALL)]


def test_drafts_that_a_step_had_no_room_for_are_not_taken_for_rejected(watch):
    """vLLM cuts the drafts of the last request for which a step has tokens left."""
    watch.step({"a": 1, "b": 1, "c": 1}, [8, 8, 8], SMALL, 1.0)
    watch.step({"a": 5, "b": 3, "c": 1}, [8, 8, 8], SMALL, 2.0, verified=[4, 2, 0])
    assert watch.seen == [(4, 4), (2, 2)]
    watch.step({"a": 5, "b": 5, "c": 5}, [8, 8, 8], SMALL, 3.0, verified=[4, 4, 4])
    assert watch.seen[2:] == [(4, 4), (4, 4), (4, 4), ("step", 4, 1.0, SMALL)]


@pytest.mark.parametrize("structured", [None, "a grammar"])
def test_the_drafter_tells_which_drafts_a_step_has_verified(monkeypatch, structured):
    """A draft that a grammar forbids is cut, too, and would have been rejected."""
    drafter, rows = object.__new__(SparseDrafter), torch.zeros(1, 100, dtype=torch.int32).numpy()
    drafter.rule, drafter.watch, seen = DraftRule(4, 0), PaceWatch(4), []
    monkeypatch.setattr(drafter, "_step", lambda runner, requests, *rest: [7 for _ in requests])
    monkeypatch.setattr(drafter.watch.pace, "observe_drafts", lambda drafts, accepted: seen.append((drafts, accepted)))
    monkeypatch.setattr(drafter.watch.pace, "choose", lambda load: 4)
    table = SimpleNamespace(num_blocks_per_row=[9], block_size=8)
    batch = SimpleNamespace(
        block_table=SimpleNamespace(block_tables=[table]), req_ids=["a"], spec_token_ids=[[]], num_reqs=1
    )
    sampling = SimpleNamespace(structured_outputs=structured)
    requests = {"a": SimpleNamespace(sampling_params=sampling)}
    runner = SimpleNamespace(input_batch=batch, requests=requests, max_model_len=100)
    drafter.runner = lambda: runner
    assert drafter.propose([[1]], torch.tensor([20]).numpy(), rows) == [[7] * 4]
    batch.spec_token_ids = [[7, 7]]
    drafter.propose([[7, 7, 3]], torch.tensor([23]).numpy(), rows)
    assert seen == [(2, 2) if structured is None else (4, 2)]
