"""The soak's checks of answers and of an idle server."""

import math
from types import SimpleNamespace

from bench.common.continuations import LOGPROB_TOLERANCE, Continuation, gap_at_first_difference
from bench.common.metrics import is_busy, read_metrics
from bench.robustness.soak.clients import Asker, Tally, run_client
from bench.robustness.soak.command import measure_drift

ALONE = Continuation([5, 6, 7], [{5: -0.1, 9: -3.0}, {6: -0.7, 8: -0.72}, {7: -0.2, 1: -2.0}])


def answer(*tokens: int) -> Continuation:
    return Continuation(list(tokens), [{}] * len(tokens))


def test_answers_part_where_two_tokens_are_about_as_likely_or_are_wrong():
    assert gap_at_first_difference(ALONE, answer(5, 6, 7)) is None
    assert math.isclose(gap_at_first_difference(ALONE, answer(5, 8, 1)), 0.02)
    assert gap_at_first_difference(ALONE, answer(5, 4, 7)) == math.inf
    tally = Tally()
    for tokens in ((5, 6, 7), (5, 8, 1), (9, 6, 7)):
        tally.add(ALONE, answer(*tokens), LOGPROB_TOLERANCE)
    assert (tally.answers, tally.parted) == (3, 2)
    assert tally.faults == ["an answer parts where the tokens' log probabilities differ by 2.9"]
    assert tally.as_row()["largest_gap"] == 2.9
    tally.add(ALONE, answer(5, 4, 7), math.inf)
    assert tally.as_row()["largest_gap"] is None


def test_what_dense_attention_parts_by_among_others_is_drift():
    def drift(*others: Continuation) -> float:
        answers = iter([ALONE, ALONE, *others])
        return measure_drift(SimpleNamespace(ask=lambda text: next(answers)), ["prompt"], len(others))

    assert drift(ALONE) == 0.0
    assert math.isclose(drift(ALONE, answer(5, 8, 1)), 0.02)
    # A token that was not among the likely ones is not explained by rounding.
    assert drift(answer(5, 4, 7)) == 0.0


def test_clients_stop_after_enough_requests():
    class Quick:
        answer_tokens = 3

        def ask_copies(self, prompt: str, copies: int) -> list[Continuation]:
            assert copies in (1, 2)
            return [answer(5, 6, 7)] * copies

        def hang_up(self, prompt: str, after: int, copies: int) -> None:
            assert after < 3

    tally = Tally(most=40)
    run_client(Quick(), {"prompt": ALONE}, LOGPROB_TOLERANCE, math.inf, 1, tally, most_copies=2)
    assert 40 <= tally.answers + tally.hung_up <= 41
    assert tally.answers > tally.hung_up > 0
    assert tally.faults == []
    assert not Tally(answers=10**6).is_full


def test_copies_are_asked_with_a_choice_of_one_token():
    """vLLM refuses several answers at temperature 0."""
    asked = []

    def create(**arguments: object) -> SimpleNamespace:
        asked.append(arguments)
        told = SimpleNamespace(tokens=["token_id:5"], top_logprobs=[{"token_id:5": -0.1}])
        return SimpleNamespace(choices=[SimpleNamespace(logprobs=told)] * arguments.get("n", 1))

    asker = Asker(SimpleNamespace(completions=SimpleNamespace(create=create)), "model", 1)
    assert [len(asker.ask_copies("prompt", copies)) for copies in (1, 3)] == [1, 3]
    assert [each["temperature"] for each in asked] == [0, 1]
    assert [each["extra_body"].get("top_k") for each in asked] == [None, 1]


def test_a_server_is_done_when_it_keeps_no_block():
    text = """# HELP vllm:num_requests_running Requests.
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_running{engine="1"} 0.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
"""
    metrics = read_metrics(text)
    assert metrics["vllm:num_requests_running"] == 1
    assert is_busy(metrics)
    assert is_busy(metrics | {"vllm:num_requests_running": 0.0})
    assert not is_busy(dict.fromkeys(metrics, 0.0))
