"""Servers under load, and windows in which they are watched."""

import asyncio
import json
import math
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from openai import OpenAI

from bench.common.metrics import read_metrics
from bench.serving.serve import Load, parse_result
from bench.serving.watch import Watched, watch
from bench.serving.window import Window, measure_window

SERVE_RESULT = {
    "date": "20261121-120000",
    "model_id": "llama-3.1-8b",
    "tokenizer_id": "/tmp/llama-3.1-8b",
    "duration": 12.5,
    "completed": 8,
    "failed": 0,
    "total_input_tokens": 262144,
    "total_output_tokens": 1024,
    "request_throughput": 0.64,
    "output_throughput": 81.92,
    "total_token_throughput": 21053.44,
} | {
    f"{kind}_{metric}_ms": value
    for metric, value in (("ttft", 1640.25), ("tpot", 12.5), ("itl", 12.25))
    for kind in ("mean", "median", "std", "p90", "p99")
}


MEASURED = Load("random", 32768, 128, 8, 8, 1)


def test_the_result_of_vllm_bench_serve_becomes_columns():
    columns = parse_result(SERVE_RESULT, MEASURED)
    assert columns["ttft_ms_median"] == 1640.25
    assert columns["tpot_ms_p99"] == 12.5
    assert columns["itl_ms_mean"] == 12.25
    assert (columns["completed"], columns["failed"], columns["seconds"]) == (8, 0, 12.5)
    assert columns["output_tokens_per_second"] == 81.92
    assert "/tmp" not in json.dumps(columns)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"completed": 0, "failed": 8}, "0 of 8 requests completed"),
        ({"completed": 7, "failed": 1, "total_output_tokens": 7 * 128}, "7 of 8 requests completed"),
        ({"total_output_tokens": 1000}, "the answers have 1000 tokens, not 1024"),
        ({"p99_itl_ms": None}, "the result lacks 'p99_itl_ms'"),
    ],
)
def test_a_result_without_whole_answers_or_columns_is_refused(change, sentence):
    result = {key: value for key, value in (SERVE_RESULT | change).items() if value is not None}
    with pytest.raises(ValueError, match=sentence):
        parse_result(result, MEASURED)


def test_loads_are_arguments_of_vllm_bench_serve():
    alone = Load("random", 32768, 128, 8, 16, 3).arguments()
    assert alone[alone.index("--random-input-len") + 1] == "32768"
    assert alone[alone.index("--max-concurrency") + 1] == "8"
    assert "--num-warmups" not in alone  # its prompt would be one of the measured ones
    shared = Load("shared_prefix", 32768, 128, 8, 16, 3).arguments()
    lengths = [int(shared[shared.index(f"--prefix-repetition-{part}-len") + 1]) for part in ("prefix", "suffix")]
    assert lengths == [31744, 1024]
    assert "--num-warmups" in shared


def test_a_watch_counts_who_runs_while_others_wait():
    looks = iter([(2, 1, 0.5, 3), (4, 1, 0.9, 5), (9, 0, 0.25, 6)])
    watched = Watched()
    for running, waiting, usage, preemptions in looks:
        text = (
            f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:num_requests_waiting{{engine="0"}} {waiting}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}\nvllm:num_preemptions_total{{engine="0"}} {preemptions}\n'
        )
        with watch(lambda text=text: text) as seen:
            pass
        assert seen.columns()["running_most"] == running
        watched.add(read_metrics(text))
    assert watched.columns() == {
        "running_most": 9, "running_mean_while_others_wait": 3.0, "kv_cache_usage_most": 0.9, "preemptions": 3,
    }  # fmt: skip
    assert Watched().columns()["running_mean_while_others_wait"] is None


class AskedServer(ThreadingHTTPServer):
    """Streams tokens to every client, and counts them. By default an answer does not end."""

    answer_tokens: float = math.inf
    last: bytes = b'data: {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 8}}\n\ndata: [DONE]\n\n'

    def __init__(self, status: int = 200):
        self.status, self.prompts, self.tokens, self.open, self.lock = status, [], 0, 0, threading.Lock()
        self.flowing = threading.Event()
        super().__init__(("127.0.0.1", 0), self.Handler)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            of = self.server
            with of.lock:
                values = {
                    "num_requests_running": of.open,
                    "num_requests_waiting": 2,
                    "generation_tokens_total": of.tokens,
                }
            values |= {"kv_cache_usage_perc": 0.0} | ({} if of.open else {"num_requests_waiting": 0})
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"vllm:{name} {value}\n" for name, value in values.items()).encode())

        def do_POST(self) -> None:
            of = self.server
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with of.lock:
                of.prompts.append(body["prompt"])
                of.open += 1
            self.send_response(of.status)
            self.end_headers()
            with suppress(OSError):
                written = 0
                while of.status == 200 and written < of.answer_tokens:
                    written += 1
                    self.wfile.write(b"data: a token\n\n")
                    with of.lock:
                        of.tokens += 1
                        if of.open >= 3 and of.tokens > 100:
                            of.flowing.set()
                self.wfile.write(of.last)
            with of.lock:
                of.open -= 1

        def log_message(self, *_: object) -> None:
            pass


@pytest.fixture
def asked_server(request):
    server = AskedServer(getattr(request, "param", 200))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def measured_window(server: AskedServer, monkeypatch, end: float = math.inf, again: bool = False) -> dict:
    """The row of a window that ends when all three clients have received tokens."""
    waited = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)
        while not server.flowing.is_set():
            await asyncio.to_thread(server.flowing.wait, 0.1)
        server.flowing.clear()

    monkeypatch.setattr("bench.serving.window.asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": wait}))
    client = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
    model = SimpleNamespace(folder=Path("needle"), vocabulary=50)
    row = measure_window(Window(1, 2, again), Load("random", 20, 8, 3, 3, 1), client, model, end)
    assert waited == [1, 2]
    return row


def test_a_window_counts_what_a_server_does_while_clients_ask_and_they_hang_up_behind_it(asked_server, monkeypatch):
    row = measured_window(asked_server, monkeypatch)
    assert (row["lead_seconds"], row["requests"], row["running_most"]) == (1, None, 3)
    assert 0 < row["output_tokens_total"] < asked_server.tokens
    assert row["output_tokens_per_second"] > 0
    assert row["running_mean_while_others_wait"] == row["running_mean"]
    # The server was quiet before the row was written, and each prompt was new.
    assert asked_server.open == 0
    assert len({tuple(prompt) for prompt in asked_server.prompts}) == len(asked_server.prompts) == 3
    assert {len(prompt) for prompt in asked_server.prompts} == {20}


@pytest.mark.parametrize("again", [False, True])
def test_a_client_asks_the_next_prompt_or_its_first_one_again(again, asked_server, monkeypatch):
    asked_server.answer_tokens = 20
    row = measured_window(asked_server, monkeypatch, again=again)
    asked = [tuple(prompt) for prompt in asked_server.prompts]
    assert row["prompts_again"] == again
    assert len(asked) > 3
    assert len(set(asked)) == (3 if again else len(asked))


def test_a_window_does_not_begin_while_requests_of_the_last_load_run(asked_server, monkeypatch):
    monkeypatch.setattr("bench.common.metrics._QUIET_SECONDS", 0)
    asked_server.open = 1
    with pytest.raises(ChildProcessError, match="the server is still busy with the requests of the last load"):
        measured_window(asked_server, monkeypatch)
    assert asked_server.prompts == []


@pytest.mark.parametrize(
    "last",
    [
        b"",
        b'data: {"error": {"message": "the engine died", "code": 500}}\n\ndata: [DONE]\n\n',
        AskedServer.last.replace(b"8}", b"7}"),
    ],
)
def test_a_window_has_no_incomplete_answers(last, asked_server, monkeypatch):
    asked_server.answer_tokens, asked_server.last = 20, last
    with pytest.raises(ChildProcessError, match=r"a client failed: .*an answer does not have 8 tokens"):
        measured_window(asked_server, monkeypatch)


@pytest.mark.parametrize("asked_server", [400], indirect=True)
def test_a_window_needs_answers_and_time(asked_server, monkeypatch):
    with pytest.raises(ChildProcessError, match=r"a client failed: .*400"):
        measured_window(asked_server, monkeypatch)
    with pytest.raises(ChildProcessError, match="the window cannot end before the deadline"):
        measured_window(asked_server, monkeypatch, end=0)
