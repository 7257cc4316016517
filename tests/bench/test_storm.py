"""The storm: its requests, its clients against small servers, and its checks."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from bench.common.continuations import LOGPROB_TOLERANCE, Continuation
from bench.robustness.__main__ import main
from bench.robustness.soak.clients import Asker
from bench.robustness.storm import ending, hostile
from bench.robustness.storm.ending import End, Idle, end_by_sigterm, processes_of, read_idle
from bench.robustness.storm.hostile import BODIES, KINDS, HostileRequests, Request
from bench.robustness.storm.load import NO_ANSWER, Hostile, Phase, Well, run_phase
from bench.robustness.storm.verdict import allowed_gap, faults_of_end, faults_of_phases, phase_columns, ratios

ALONE = Continuation([5, 6, 7], [{5: -0.1, 9: -3.0}, {6: -0.7, 8: -0.72}, {7: -0.2, 1: -2.0}])
PARTED = Continuation([5, 8, 7], [{}] * 3)


def requests(longest: int = 64) -> HostileRequests:
    return HostileRequests("model", ["a prompt"], [list(range(longest - 8))], longest)


def test_every_hostile_request_is_sent():
    drawn, rng = requests(), random.Random(0)
    sent = [drawn.draw(rng) for _ in range(3000)]
    assert {request.kind for request in sent} == set(KINDS)
    assert {request.body for request in sent if request.kind == "bodies"} == set(BODIES)
    bodies = {kind: [json.loads(each.body) for each in sent if each.kind == kind] for kind in KINDS if kind != "bodies"}
    assert all(each["vllm_xargs"] == {"sparse": "dense"} for each in bodies["dense"])
    for number, arguments in enumerate(hostile.ARGUMENTS):
        assert bodies["arguments"][number]["vllm_xargs"] == arguments
    for number, fields in enumerate(hostile.FIELDS):
        assert fields.items() <= bodies["fields"][number].items()
    prompts = [each["prompt"] for each in bodies["too long"]]
    assert min(map(len, prompts)) > 64
    assert {type(prompt) for prompt in prompts} == {str, list}
    assert {request.lines for request in sent if request.kind == "hang-ups"} == set(range(6))
    assert {request.lines for request in sent if request.kind != "hang-ups"} == {None}


@contextmanager
def server(answer):
    """A server on a local port. `answer` takes the handler of each request; yields the port."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            answer(self)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        try:
            yield found.server_port
        finally:
            found.shutdown()
            thread.join()


def end(handler, status: int, body: bytes = b""):
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def test_statuses_of_hostile_requests():
    statuses = iter([200, 400, 500, None])

    def answer(handler):
        status = next(statuses)
        if status is not None:
            end(handler, status, b"text\n")

    with server(answer) as port:
        sender = Hostile(port, requests(), 1, 1)
        found = [sender.send(Request("fields", "/", b"{}")) for _ in range(4)]
    assert found == ["200", "400", "500", NO_ANSWER]


def test_a_hang_up_leaves_before_the_answer_ends():
    broken = threading.Event()

    def answer(handler):
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b"data: more\n")
        except OSError:
            broken.set()

    with server(answer) as port:
        assert Hostile(port, requests(), 1, 1).send(Request("hang-ups", "/", b"{}", 2)) == "200"
        assert broken.wait(60)


def test_the_end_of_a_storm_ends_requests_that_wait():
    arrived, over = threading.Event(), threading.Event()

    def answer(handler):
        arrived.set()
        over.wait()

    with server(answer) as port:
        attackers = Hostile(port, requests(), 3, 0.001)
        threads = attackers.ask()
        arrived.wait()
        attackers.stop()
        for thread in threads:
            thread.join()
        over.set()
    row = attackers.as_row()
    assert {status for statuses in row["statuses"].values() for status in statuses} == {"hung up"}
    assert sum(row["requests"].values()) <= 3
    assert row["failed"] == {}


def test_a_request_that_connects_after_the_end_does_not_wait(monkeypatch):
    connect = HTTPConnection.connect

    def connect_after_the_end(connection):
        attackers.stop()
        connect(connection)

    monkeypatch.setattr(HTTPConnection, "connect", connect_after_the_end)
    monkeypatch.setattr("bench.robustness.storm.load._SECONDS", 1)
    over = threading.Event()
    with server(lambda handler: over.wait()) as port:
        attackers = Hostile(port, requests(), 1, 1)
        assert attackers.send(Request("dense", "/", b"{}")) == "hung up"
        over.set()


def test_a_server_that_takes_too_long_is_late(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr("bench.robustness.storm.load._SECONDS", 0.01)
    with server(lambda handler: over.wait()) as port:
        assert Hostile(port, requests(), 1, 1).send(Request("dense", "/", b"{}")) == "late"
        over.set()


def test_a_failed_hostile_request_is_shown():
    def answer(handler):
        end(handler, 500)
        attackers.stop()

    with server(answer) as port:
        attackers = Hostile(port, requests(), 1, 0.001)
        for thread in attackers.ask():
            thread.join()
    failed = attackers.as_row()["failed"]
    # The client may have sent another request before the end.
    assert set(failed.values()) == {"500"}
    assert {request.partition(": ")[0] for request in failed} <= set(KINDS)


class FakeAsker:
    def __init__(self, *answers):
        self.answers, self.seeds = iter(answers), []

    def ask_timed(self, prompt, seed):
        self.seeds.append((prompt, seed))
        found = next(self.answers)
        if isinstance(found, Exception):
            raise found
        return found, 3.0


def test_answers_are_compared_with_the_first_ones():
    asker = FakeAsker(ALONE, ALONE, PARTED, ALONE, ConnectionError("the server\nis gone"))
    well = Well(asker, ["a", "b"], 1)
    first = run_phase(well, "quiet", 0)
    assert (first.ms_per_token, first.gaps, first.failures) == ([3.0], [], [])
    over = iter([False, False, False, True])
    second = Phase("storm")
    for thread in well.ask(second, lambda: next(over)):
        thread.join()
    assert asker.seeds == [("a", 0), ("a", 0), ("b", 1), ("a", 0), ("b", 1)]
    # The first answer to b is the one to compare with.
    assert second.gaps == []
    assert second.failures == ["a well-behaved request failed: the server is gone"]
    third = Phase("third")
    assert Well(FakeAsker(ALONE), ["a"], 1).ask_once(third, 0)
    changing = Well(FakeAsker(ALONE, PARTED), ["a"], 1)
    assert all(changing.ask_once(third, 0) for _ in range(2))
    assert third.gaps == pytest.approx([0.02])


def part(*tokens: int):
    told = SimpleNamespace(
        tokens=[f"token_id:{token}" for token in tokens],
        top_logprobs=[{f"token_id:{token}": -0.5} for token in tokens],
    )
    return SimpleNamespace(choices=[SimpleNamespace(logprobs=told)])


def test_time_per_token_begins_with_the_first_part(monkeypatch):
    sent = {}

    def create(**arguments):
        sent.update(arguments)
        return iter([SimpleNamespace(choices=[]), part(1), part(2, 3), part(4, 5)])

    asker = Asker(SimpleNamespace(completions=SimpleNamespace(create=create)), "model", 5)
    times = iter([9.0, 10.0, 10.5, 12.0])
    monkeypatch.setattr("bench.robustness.soak.clients.time.monotonic", lambda: next(times))
    found, ms_per_token = asker.ask_timed("prompt", seed=3)
    assert (found.tokens, ms_per_token) == ([1, 2, 3, 4, 5], 500.0)
    assert found.logprobs[4] == {5: -0.5}
    assert (sent["stream"], sent["temperature"], sent["extra_body"]["seed"]) == (True, 0, 3)
    times = iter([9.0, 10.0, 10.5, 12.0])
    with pytest.raises(ConnectionError, match="5 of 6 tokens"):
        Asker(asker.client, "model", 6).ask_timed("prompt")
    whole = SimpleNamespace(completions=SimpleNamespace(create=lambda **_: iter([part(1, 2, 3, 4)])))
    times = iter([9.0, 11.0])
    assert Asker(whole, "model", 4).ask_timed("prompt")[1] == 500.0


def phases(**storm) -> list[Phase]:
    answered = {"ms_per_token": [10.0, 12.0]}
    return [
        Phase("quiet", **answered),
        Phase("quiet again", [10.0, 12.0], gaps=[0.3, math.inf]),
        Phase("storm", **{**answered, **storm}),
        Phase("end", [10.0]),
    ]


def test_the_checks_of_the_phases():
    def faults(preemptions=0, failed=(), own_kinds=hostile.OWN_KINDS, **storm):
        found = phases(**storm)
        return faults_of_phases(found, allowed_gap(found[:2]), preemptions, {"failed": dict(failed)}, 1.5, own_kinds)

    assert allowed_gap(phases()[:1]) == LOGPROB_TOLERANCE
    assert allowed_gap(phases()[:2]) == 0.3
    assert faults() == []
    assert faults(gaps=[0.3]) == []
    assert faults(gaps=[0.3, 0.31]) == ["storm: 1 answers changed by more than rounding, 0 requests were preempted"]
    assert faults(preemptions=1, gaps=[math.inf]) == []
    assert faults(ms_per_token=[16.6]) == [
        "storm: the median time per token is 1.51 times that without it, allowed: 1.5"
    ]
    assert faults(ms_per_token=[]) == ["storm: no well-behaved request was answered"]
    assert faults(failures=["it failed"] * 9) == ["storm: it failed"]
    assert faults(failed={"arguments: {}": "500"}) == ["storm: a hostile request got 500: arguments: {}"]
    assert faults(failed={"arguments: {}": "500"}, own_kinds=()) == []
    assert faults(failed={"schemas: {}": "500"}) == []
    assert faults(failed={"schemas: {}": NO_ANSWER}) == ["storm: a hostile request got no answer: schemas: {}"]


def test_columns_of_a_phase():
    *_, storm, _ = phases(gaps=[0.2, 0.4])
    assert phase_columns(storm, 0.3) == {
        "seconds": 0.0, "answers": 2, "changed": 2, "changed_too_far": 1, "largest_gap": 0.4,
        "ms_per_token_median": 11.0, "ms_per_token_p99": 11.98,
    }  # fmt: skip
    assert phase_columns(phases()[1], 0.3)["largest_gap"] is None
    assert phase_columns(Phase("storm"), 0.3)["ms_per_token_median"] is None
    assert ratios(Phase("quiet", [10.0]), Phase("storm", [15.0])) == {"ratio_median": 1.5, "ratio_p99": 1.5}
    assert ratios(Phase("quiet"), storm) == {}


METRICS = """# HELP vllm:num_requests_running Requests.
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:num_preemptions_total{engine="0"} 3.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="101",num_gpu_blocks_override="None"} 1.0
"""


def test_the_checks_of_the_end():
    before, after = Idle(0, 0, 0, 100, 0), read_idle(METRICS)
    assert after == Idle(2, 1, 25, 100, 3)
    ended = End(1.0, [])
    assert faults_of_end(before, before, 200, ended) == []
    assert faults_of_end(before, after, 503, End(60.0, ["python", "worker"])) == [
        "end: 2 requests run and 1 wait",
        "end: 25 of 100 blocks are in use without requests",
        "end: /health answers 503",
        "end: SIGTERM leaves python, worker after 60 seconds",
    ]
    assert faults_of_end(before, None, None, ended) == ["end: the server does not answer", "end: /health answers None"]


def test_sigterm_must_end_every_process_of_a_server(monkeypatch):
    child = "import signal; signal.pause()"
    stays = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); print(flush=True); {child}"

    def start(text: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, start_new_session=True)
        if "print" in text:
            process.stdout.readline()
        return process

    alone = start(child)
    assert len(processes_of(alone.pid)) == 1
    assert end_by_sigterm(alone).left == []
    assert alone.returncode is not None
    monkeypatch.setattr(ending, "_END_SECONDS", 0)
    leader = start(stays)
    try:
        leader.kill()
        leader.wait()
        assert len(end_by_sigterm(leader).left) == 1
    finally:
        os.killpg(leader.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--longest", "40K"], "longest: got '40K', allowed: a positive integer up to 32768, such as 4K"),
        (["--longest", "x"], "longest: got 'x', allowed: a positive integer up to 32768, such as 4K"),
        (
            ["--context", "8K", "--longest", "8K"],
            "context: got '8K', allowed: a positive integer up to 8128, such as 4K",
        ),
        (["--preset", "art", "--backend", "dense"], "preset: got 'art' with dense, allowed: none, or a backend of the"),
        (["--preset", "x", "--additional-config", "["], "additional_config: got text that is not JSON"),
    ],
)
def test_refusals(refused, tmp_path, arguments, sentence):
    assert refused(main, "storm", "--output", str(tmp_path / "x"), *arguments).startswith(sentence)
    assert not list(tmp_path.iterdir())
