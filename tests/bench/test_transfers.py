"""Clients that leave between a server that prefills and one that decodes."""

import json
import socket
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from bench.common.continuations import Continuation
from bench.robustness.storm.ending import Idle
from bench.robustness.transfers import command
from bench.robustness.transfers.command import ANSWER, HANG_UPS, compared, faults_of, leave, leave_between, plan

ALONE = Continuation([5, 6, 7], [{5: -0.1, 9: -3.0}, {6: -0.7, 8: -0.72}, {7: -0.2, 1: -2.0}])
WRONG = Continuation([9, 6, 7], [{9: -0.1, 5: -3.0}, {6: -0.7}, {7: -0.2}])


def test_each_way_to_leave_is_taken_as_often_between_the_answers():
    kinds = plan(8, 5)
    assert Counter(kinds) == dict.fromkeys(HANG_UPS, 2) | {ANSWER: 5}
    assert kinds == plan(8, 5)
    assert kinds != sorted(kinds)


@pytest.mark.parametrize("patience", [0.0, 0.01])
def test_a_client_leaves_without_an_answer(patience):
    """The listener never answers, so a client that waited for one would not return."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        received = []

        def read() -> None:
            connection, _ = listener.accept()
            with connection:
                while part := connection.recv(4096):
                    received.append(part)

        reader = threading.Thread(target=read)
        reader.start()
        client = SimpleNamespace(base_url=SimpleNamespace(port=listener.getsockname()[1]))
        leave(client, patience, prompt=[1, 2], kv_transfer_params={"a": 1})
        reader.join()
    _, body = b"".join(received).split(b"\r\n\r\n")
    assert json.loads(body)["kv_transfer_params"] == {"a": 1}


def tried(monkeypatch, kinds, answer=ALONE, after=0, moved=4, failing=None):
    """Row and faults of two servers of which the second ends with some blocks in use."""
    asked = Counter()

    def run(kind, *_):
        asked[kind] += 1
        if kind == failing:
            raise ConnectionError("gone")
        return answer if kind == ANSWER else None

    def idle_pair(*_):
        used = after if asked else 0
        return {"prefill": Idle(0, 0, 0, 9, 0), "decode": Idle(int(used > 1), 0, used, 9, 0)}

    class Silent:
        def __init__(self, *_):
            self.answer_tokens = 3

        def ask(self, *_, **__):
            return ALONE

    patches = {
        "run": run, "idle_pair": idle_pair, "Asker": Silent, "prompts": lambda: [[1, 2], [3, 4]],
        "prefilled": lambda *_: {}, "moved_tokens": lambda _: moved,
        "metrics_text": lambda _: "vllm:nixl_num_kv_expired_reqs_total{} 2.0",
        "wait_until_quiet": lambda _: None,
    }  # fmt: skip
    for name, value in patches.items():
        monkeypatch.setattr(command, name, value)
    server = SimpleNamespace(client=None)
    return leave_between(server, server, kinds, 3)


def test_nothing_lost_is_no_fault(monkeypatch):
    row, faults = tried(monkeypatch, plan(8, 4))
    assert faults == []
    assert row["beside_hang_ups"] == {"answers": 4, "parted": 0, "too_far": 0, "logprob_error": 0.0}
    assert row["leaked_blocks"] == {"prefill": 0, "decode": 0}
    assert (row["expired"], row["unexpected_notifications"]) == (2, 0)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"answer": WRONG}, "beside_hang_ups: 4 of 4 answers part by more than a tie"),
        ({"after": 1}, "decode: 1 blocks are in use without requests"),
        ({"after": 2}, "decode: 1 requests run and 0 wait"),
        ({"moved": 1}, "1 of 4 tokens came from the other server"),
        ({"failing": "between"}, "between: a request failed: gone"),
    ],
)
def test_what_is_lost_is_a_fault(monkeypatch, changes, fault):
    assert fault in tried(monkeypatch, plan(8, 4), **changes)[1]


def test_a_request_that_was_not_sent_is_a_fault():
    same = compared([(ALONE, ALONE)])
    row = {
        "sent": {ANSWER: 1}, "moved_alone": same, "beside_hang_ups": same, "moved_tokens_alone": 4, "prompt_tokens": 4,
        "end": {}, "leaked_blocks": {},
    }  # fmt: skip
    assert faults_of(row, [ANSWER]) == []
    assert faults_of(row, [ANSWER, "between"]) == ["sent {'answer': 1} of {'answer': 1, 'between': 1}"]
