"""Features of vLLM that touch requests: beams, priorities, sessions, salts, preemption. One engine serves many."""

from typing import Any

import pytest
from support.engines import in_fresh_process, save_shallow
from support.features import BLOCK, BLOCKS, NEW, PROMPT, see_compacted, see_requests, see_schedules


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    return save_shallow(tmp_path_factory.mktemp("shallow"), layers=2)


@pytest.fixture(scope="module")
def requests(shallow) -> dict[str, Any]:
    return in_fresh_process(see_requests, shallow)


@pytest.fixture(scope="module")
def schedules(shallow) -> dict[str, Any]:
    return in_fresh_process(see_schedules, shallow)


def test_the_longest_context_may_follow_from_the_memory(requests):
    """vLLM keeps one block for itself."""
    assert requests["max_model_len"] == BLOCK * (BLOCKS - 1)
    assert requests["alone"] != requests["dense"]


def test_several_answers_to_a_prompt_are_those_of_as_many_requests(requests):
    assert requests["n"] == requests["one by one"]
    assert len({tuple(answer) for answer in requests["n"]}) == 3


def test_beams_have_the_log_probabilities_of_prompts_that_end_there(requests):
    """vLLM makes a new request of every token of a beam, and a prompt attends densely."""
    assert requests["beams"] == pytest.approx(requests["sums"], abs=1e-4)
    assert requests["beams read"] == 0


def test_a_salt_of_the_client_keeps_its_blocks_from_others_and_an_argument_changes_nothing(requests):
    answers, hits = zip(*requests["salted"], strict=True)
    assert set(map(tuple, answers)) == {tuple(requests["alone"])}
    assert hits == (0, 0, PROMPT // BLOCK * BLOCK)


@pytest.mark.parametrize("after", [1, 3, 12])
def test_a_preempted_request_goes_on_as_a_new_one_with_its_answer_in_the_prompt(requests, after):
    """Preempted within its prompt it has the answer that it has alone. Later its own tokens are recomputed densely."""
    before, whole = requests["preempted"][after]
    assert len(before) == max(0, after - 3)
    assert whole == requests["fresh"][after]
    assert whole[: len(before)] == requests["alone"][: len(before)]
    assert requests["used"] == 0


def test_a_request_of_high_priority_preempts_one_of_low_priority(schedules):
    assert schedules["preemptions"] >= 1
    assert schedules["ends"][-1] == "low"
    assert all(len(answer) == NEW for answer in schedules["answers"].values())
    before = schedules["before"]
    assert before
    assert schedules["answers"]["low"][: len(before)] == before
    assert schedules["used"] == 0


def test_a_session_answers_as_requests_with_its_turns_in_the_prompt(schedules):
    first, second = schedules["session"]
    assert [first, second] == schedules["turns"]


@pytest.mark.parametrize("backend", ["snapkv", "h2o"])
def test_a_prompt_that_is_preempted_votes_anew(shallow, backend):
    seen = in_fresh_process(see_compacted, shallow, backend)
    assert seen["preempted"] == {1: seen["alone"], 3: seen["alone"]}
    assert seen["used"] == 0
