import asyncio
import json
import math
import statistics
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from openai import OpenAI

from bench.common.engine import Variant, WrongBackendError, force_routing
from bench.common.metrics import read_metrics
from bench.common.models import NEEDLE_8M, SHAPES, open_model
from bench.common.options import ClientRow, parse_grid, parse_loads
from bench.common.results import ResultFile, read_run, read_runs, spread
from bench.common.worker import BenchWorker
from bench.quality.__main__ import main as quality_main
from bench.quality.accuracy import all_settings, unfinished
from bench.quality.accuracy import tables as accuracy_tables
from bench.serving.__main__ import main as serving_main
from bench.serving.compaction import Timed
from bench.serving.compaction import columns as compaction_columns
from bench.serving.decode import DecodeSettings, draw_prompts, forecast_seconds, measure_batch
from bench.serving.decode import table as decode_table
from bench.serving.lossless import LosslessSettings, measure_requests
from bench.serving.lossless import table as lossless_table
from bench.serving.prefill import Measurement, PrefillSettings, fresh_prompts, measure, plan
from bench.serving.prefill import table as prefill_table
from bench.serving.serve import Load, fit, make_loads, parse_result
from bench.serving.watch import Watched, watch
from bench.serving.window import Window, measure_window
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.errors import ConfigurationError

RUN = {"date": "2026-11-21", "model": "llama-3.1-8b", "versions": {}, "hardware": {"gpu": "NVIDIA H200"}}


@pytest.fixture
def refused(monkeypatch, capsys):
    """Calls a command line that must end in one sentence before an engine starts."""

    def started(command, **_kwargs):
        if command[0] in ("git", "nvidia-smi"):
            raise FileNotFoundError
        raise AssertionError("a process was started")

    def call(main, *arguments: str) -> str:
        monkeypatch.setattr(subprocess, "Popen", started)
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        assert err.startswith("error: ")
        assert len(err.splitlines()) == 1
        return err.removeprefix("error: ").rstrip("\n")

    return call


def settings(**changes) -> DecodeSettings:
    values = {
        "model": "llama-3.1-8b",
        "variant": "flash_attn",
        "additional_config": None,
        "grid": parse_grid(["32K=1,8"]),
        "new_tokens": 4,
        "repeats": 3,
        "max_num_seqs": 32,
        "gpu_memory_utilization": 0.9,
        "block_size": None,
        "max_num_batched_tokens": None,
        "noise_cache": False,
        "output": "unused",
    }
    return DecodeSettings(**values | changes)


@pytest.mark.parametrize("ratio", [0, 0.25, 0.6, 1])
def test_forced_routing_skips_its_share_of_the_groups_and_keeps_other_settings(ratio):
    with open_model("llama-3.1-8b") as model:
        text = force_routing(model, '{"sparse_attention": {"min_context_tokens": 5}, "other": 1}', ratio)
    assert Variant.parse("unique").additional_config(text) == text
    given = json.loads(text)
    assert given.pop("other") == 1
    resolved = resolve(given["sparse_attention"], "unique")
    assert resolved.config.min_context_tokens == 5
    skipped = [
        torch.full((8,), 0.99) >= resolved.routing.of_layer(layer, range(8), "cpu").coefficients[:, 0]
        for layer in range(32)
    ]
    assert int(torch.stack(skipped[2:]).sum()) == round(ratio * 30 * 8)
    assert max(int(layer.sum()) for layer in skipped[2:]) - min(int(layer.sum()) for layer in skipped[2:]) <= 1
    with pytest.raises(ConfigurationError, match="skip_ratio: got 2, allowed: 0 to 1"):
        force_routing(model, None, 2)


def test_the_shape_of_llama_is_that_of_its_checkpoint():
    transformers = pytest.importorskip("transformers")
    with open_model("llama-3.1-8b") as model:
        config = transformers.AutoConfig.from_pretrained(model.folder)
        assert model.drawn_weights
        assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
        assert config.rope_parameters["rope_type"] == "llama3"
        assert config.max_position_embeddings == 131072
        assert (model.folder / "tokenizer.json").exists()
        # 8.03e9 parameters; 0.525e9 of them are the embedding, which is not multiplied.
        assert model.matrix_elements == pytest.approx(7.504e9, rel=1e-3)
        assert model.kv_bytes_per_token("auto") == 128 * 1024
        assert model.kv_bytes_per_token("fp8") == 64 * 1024
        folder = model.folder
    assert not folder.exists()


def test_a_folder_is_a_model_and_is_left_alone():
    with open_model("needle-8m") as named, open_model(str(NEEDLE_8M)) as given:
        assert named == given
        assert not named.drawn_weights
    assert NEEDLE_8M.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dense", Variant(None)),
        ("FLASH_ATTN:fp8", Variant("FLASH_ATTN", "fp8")),
        ("unique:auto", Variant("UNIQUE", "auto")),
    ],
)
def test_variants_are_parsed_from_their_names(text, expected):
    assert Variant.parse(text) == expected
    assert Variant.parse(expected.name) == expected


def test_settings_reach_our_backends_only():
    text = '{"sparse_attention": {"selection": {"budget_tokens": 256}}}'
    assert Variant.parse("unique").additional_config(text) == text
    assert Variant.parse("flash_attn").additional_config(text) is None
    with pytest.raises(ConfigurationError, match="budget_tokens: got 3"):
        Variant.parse("unique").additional_config('{"sparse_attention": {"selection": {"budget_tokens": 3}}}')


def test_another_backend_than_the_one_asked_for_is_no_result():
    assert Variant.parse("dense").check_backends(["CPU_ATTN"]) == "CPU_ATTN"
    assert Variant.parse("unique").check_backends(["UNIQUE"]) == "UNIQUE"
    for used in (["FLASH_ATTN"], ["FLASH_ATTN", "UNIQUE"], []):
        with pytest.raises(WrongBackendError, match="unique: vLLM runs "):
            Variant.parse("unique").check_backends(used)


def test_drawn_weights_are_no_longer_tiny():
    class Worker(BenchWorker):
        def __init__(self) -> None:
            self.model = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False), torch.nn.RMSNorm(64))
            for parameter in self.model.parameters():
                torch.nn.init.uniform_(parameter, -1e-3, 1e-3)

        def get_model(self) -> torch.nn.Module:
            return self.model

    worker = Worker()
    worker.draw_weights()
    assert worker.model(torch.randn(100, 256)).std().item() == pytest.approx(1, abs=0.1)


def test_grids_are_sorted_by_context():
    rows = parse_grid(["128K=1,max", "2048=24,6"])
    assert [(row.context, row.batches) for row in rows] == [(2048, (24, 6)), (131072, (1, None))]
    assert parse_grid(["32K,8K=1,8"]) == parse_grid(["8K=1,8", "32K=1,8"])


def test_prompts_differ_at_once_and_short_ones_begin_long_ones():
    prompts = draw_prompts(6, 100, 4096)
    assert len({prompt[0] for prompt in prompts}) == 6
    assert {len(prompt) for prompt in prompts} == {100}
    assert all(2 < token < 4096 for prompt in prompts for token in prompt)
    assert draw_prompts(2, 100, 4096) == prompts[:2]


def test_the_forecast_counts_each_token_of_a_prompt_once():
    with open_model("llama-3.1-8b") as model:
        short = forecast_seconds(model, settings(grid=parse_grid(["32K=1,8"])))
        again = forecast_seconds(model, settings(grid=parse_grid(["32K=8,8"]), repeats=1))
        longer = forecast_seconds(model, settings(grid=parse_grid(["32K=1,8", "64K=8"])))
        alone = forecast_seconds(model, settings(grid=parse_grid(["64K=8"])))
    assert again == pytest.approx(short, rel=0.05)
    assert alone < longer < alone + 2


def test_times_are_differences_over_new_tokens(monkeypatch):
    clock = 0.0
    asked = []

    def generate(prompts, tokens):
        nonlocal clock
        asked.append(tokens)
        clock += 5 + tokens * 0.002 + (0.004 if len(asked) == 5 else 0)
        return [96 for _ in prompts]

    monkeypatch.setattr("bench.serving.decode.time.perf_counter", lambda: clock)
    columns = measure_batch(generate, [[1] * 100], settings(), 90)
    assert asked == [1, 5, 5, 1, 5, 1, 5, 1]
    assert columns["ms_per_token"] == pytest.approx(2)
    assert columns["ms_per_token_p80"] > columns["ms_per_token_p20"] == pytest.approx(2)
    assert columns["prefill_seconds"] == pytest.approx(5.002)


def test_a_time_that_includes_prefill_is_no_result():
    with pytest.raises(RuntimeError, match="only 16 of a prompt's tokens came from the prefix cache, not 90"):
        measure_batch(lambda prompts, _: [16 for _ in prompts], [[1] * 100], settings(), 90)


def test_spread_of_one_and_of_many():
    assert spread([3.0]) == (3.0, 3.0, 3.0)
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == (3.5, 2.0, 5.0)
    assert spread([1.0, 2.0])[0] == statistics.median([1.0, 2.0])


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


def test_the_result_of_vllm_bench_serve_becomes_columns():
    columns = parse_result(SERVE_RESULT)
    assert columns["ttft_ms_median"] == 1640.25
    assert columns["tpot_ms_p99"] == 12.5
    assert columns["itl_ms_mean"] == 12.25
    assert (columns["completed"], columns["failed"], columns["seconds"]) == (8, 0, 12.5)
    assert columns["output_tokens_per_second"] == 81.92
    assert "/tmp" not in json.dumps(columns)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"completed": 0, "failed": 8}, "no request completed, 8 failed"),
        ({"p99_itl_ms": None}, "the result lacks 'p99_itl_ms'"),
    ],
)
def test_a_result_without_answers_or_columns_is_refused(change, sentence):
    result = {key: value for key, value in (SERVE_RESULT | change).items() if value is not None}
    with pytest.raises(ValueError, match=sentence):
        parse_result(result)


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
    """Streams tokens to every client without end, and counts them."""

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
                while of.status == 200:
                    self.wfile.write(b"data: a token\n\n")
                    with of.lock:
                        of.tokens += 1
                        if of.open == 3 and of.tokens > 100:
                            of.flowing.set()
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


def measured_window(server: AskedServer, monkeypatch, end: float = math.inf) -> dict:
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
    row = measure_window(Window(1, 2), Load("random", 20, 8, 3, 3, 1), client, model, end)
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


@pytest.mark.parametrize("asked_server", [400], indirect=True)
def test_a_window_needs_answers_and_time(asked_server, monkeypatch):
    with pytest.raises(ChildProcessError, match=r"a client failed: .*400"):
        measured_window(asked_server, monkeypatch)
    with pytest.raises(ChildProcessError, match="the window cannot end before the deadline"):
        measured_window(asked_server, monkeypatch, end=0)


def decode_rows() -> list[dict]:
    return [
        {"variant": variant, "context_tokens": context, "batch": batch, "ms_per_token": context / 16384 * factor + 5}
        for variant, factor in (("flash_attn", 1.0), ("unique", 0.1))
        for context in (2048, 32768, 131072)
        for batch in (1, 6)
    ] + [{"variant": "unique", "context_tokens": 131072, "batch": 24, "skipped": "the KV cache holds 6 requests"}]


def write_results(path: Path, *runs: list[dict]) -> Path:
    lines = [line for rows in runs for line in (RUN, *rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_results_of_several_runs_can_follow_each_other(tmp_path):
    rows = decode_rows()
    runs = read_runs(write_results(tmp_path / "both.jsonl", rows[:3], rows[3:]))
    assert [run.rows for run in runs] == [rows[:3], rows[3:]]
    assert runs[0].about == RUN
    assert read_run(tmp_path / "both.jsonl").rows == rows


def test_a_result_file_is_begun_and_gone_on_with(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResultFile(path, RUN) as file:
        file.write({"batch": 1})
        assert read_run(path).rows == [{"batch": 1}]
    with ResultFile(path) as file:
        file.write({"batch": 2})
    assert [row["batch"] for row in read_run(path).rows] == [1, 2]
    with ResultFile(path, RUN):
        pass
    assert read_run(path).rows == []


def test_the_table_has_a_column_for_each_variant_and_a_dash_where_nothing_was_measured():
    lines = decode_table(decode_rows())
    assert [column.header for column in lines.columns] == ["context", "batch", "flash_attn", "unique"]
    cells = [list(column.cells) for column in lines.columns]
    assert cells[1] == ["1", "6", "1", "6", "1", "6", "24"]
    assert cells[3][-2:] == ["5.80", "-"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot_draws_a_panel_for_each_batch(monkeypatch, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    results = write_results(tmp_path / "decode.jsonl", decode_rows())
    picture = tmp_path / f"decode{suffix}"
    monkeypatch.setattr(sys, "argv", ["bench", "plot", str(results), "--output", str(picture)])
    with pytest.raises(SystemExit) as ended:
        serving_main()
    assert not ended.value.code
    assert picture.stat().st_size > 5000


def test_decode_times_on_a_cpu_are_written_as_they_are_measured(monkeypatch, tmp_path, capsys):
    served = []

    @contextmanager
    def run_server(name, settings, _console):
        served.append((name, settings.backend))
        yield name

    monkeypatch.setattr("bench.serving.decode_cpu.run_server", run_server)
    monkeypatch.setattr(
        "bench.serving.decode_cpu.decode_seconds",
        lambda client, prompt, repeats: [len(prompt) * (1e-6 if client == "unique" else 3e-6)] * repeats,
    )
    monkeypatch.setattr("bench.serving.decode_cpu.operation_seconds", lambda context: {"score": context * 1e-9})
    output = tmp_path / "out.jsonl"
    arguments = ["decode-cpu", "--context", "2K,4K", "--repeats", "2", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        serving_main()
    assert not ended.value.code
    assert served == [("dense", None), ("unique", "unique")]
    rows = read_run(output).rows
    assert [(row.get("backend"), row["context_tokens"]) for row in rows] == [
        ("dense", 2048), ("dense", 4096), ("unique", 2048), ("unique", 4096), (None, 2048), (None, 4096)
    ]  # fmt: skip
    assert len(rows[0]["seconds_per_token"]) == 2
    assert "3.00" in capsys.readouterr().out


def test_prefill_times_on_a_cpu_are_written_as_they_are_measured(monkeypatch, tmp_path, capsys):
    @contextmanager
    def run_server(name, settings, _console):
        yield name, settings.backend, settings.max_model_len

    monkeypatch.setattr("bench.serving.prefill_cpu.run_server", run_server)
    monkeypatch.setattr(
        "bench.serving.prefill_cpu.measure", lambda client, prompt: {"client": client[0], "prefill_seconds": 0.5}
    )
    monkeypatch.setattr("bench.serving.prefill_cpu.statistics.median", lambda values: len(list(values)))
    output = tmp_path / "out.jsonl"
    monkeypatch.setattr(sys, "argv", ["bench", "prefill-cpu", "--repeats", "2", "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        serving_main()
    assert not ended.value.code
    rows = read_run(output).rows
    assert [(row["backend"], row["client"], row["context_tokens"]) for row in rows] == [
        ("dense", "dense", 4090), ("dense", "dense", 4090), ("unique", "unique", 4090), ("unique", "unique", 4090)
    ]  # fmt: skip
    assert "unique, 4090 tokens: client 2, prefill_seconds 2" in capsys.readouterr().out


def test_prefill_refuses_a_backend_that_there_is_not(refused, tmp_path):
    sentence = refused(serving_main, "prefill-cpu", "--backend", "fastest", "--output", str(tmp_path / "out"))
    assert sentence.startswith("backend: got 'fastest', allowed: dense, unique")


def prefill_settings(**changes) -> PrefillSettings:
    values = {
        "model": "llama-3.1-8b",
        "variant": "flash_attn",
        "additional_config": None,
        "contexts": (32768, 8192),
        "prefix_hit": True,
        "loads": parse_loads(["32K=32,128K=4"]),
        "repeats": 3,
        "chunk": 2048,
        "gpu_memory_utilization": 0.9,
        "time_limit": 600,
        "output": "unused",
    }
    return PrefillSettings(**values | changes)


class FakeEngine:
    """Computes 1000 tokens per second of its own clock, and caches prompts in blocks of 16 tokens."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.seen: list[list[int]] = []
        self.asked: list[tuple[list[int], int]] = []
        monkeypatch.setattr("bench.serving.prefill.time.perf_counter", lambda: self.now)

    def generate(self, prompts, tokens):
        self.asked.append(([len(prompt) for prompt in prompts], tokens))
        cached = [max((self.shared(prompt, other) for other in self.seen), default=0) for prompt in prompts]
        self.now += sum(len(prompt) + tokens - 1 - hit for prompt, hit in zip(prompts, cached, strict=True)) / 1000
        self.seen += prompts
        return cached

    @staticmethod
    def shared(prompt, other):
        length = 0
        while length + 16 < len(prompt) and prompt[length : length + 16] == other[length : length + 16]:
            length += 16
        return length


@pytest.fixture
def fake_engine(monkeypatch):
    return FakeEngine(monkeypatch)


def test_prefill_measures_short_contexts_first_and_prompts_leave_room_for_their_answers():
    settings = prefill_settings()
    assert settings.longest == 131072
    assert plan(settings, 131072) == [
        Measurement("first_token", 8192, 8192),
        Measurement("first_token", 32768, 32768),
        Measurement("load", 32768, 32768, 32),
        Measurement("load", 131072, 130944, 4),
        Measurement("prefix_hit", 32768, 32768),
    ]
    alone = prefill_settings(contexts=(131072,), loads=(), prefix_hit=False)
    assert plan(alone, 131072) == [Measurement("first_token", 131072, 131071)]


def test_the_first_prompt_of_a_context_does_not_count(fake_engine):
    draw = fresh_prompts(4096)
    columns = measure(Measurement("first_token", 512, 500), fake_engine.generate, draw, prefill_settings())
    assert fake_engine.asked == [([500], 1)] * 4
    assert columns == {"cached_tokens": 0, "seconds": [0.5] * 3, "seconds_median": 0.5}
    assert len({prompt[0] for prompt in fake_engine.seen}) == 4


def test_behind_a_prefix_hit_a_quarter_of_a_prompt_is_computed(fake_engine):
    draw = fresh_prompts(4096)
    columns = measure(Measurement("prefix_hit", 512, 512), fake_engine.generate, draw, prefill_settings())
    assert fake_engine.asked == [([384], 1), ([512], 1)] * 4
    assert columns == {"cached_tokens": 384, "seconds": [0.128] * 3, "seconds_median": 0.128}


def test_a_load_is_asked_at_once_and_counts_every_token(fake_engine):
    draw = fresh_prompts(4096)
    columns = measure(Measurement("load", 4096, 4000, 5), fake_engine.generate, draw, prefill_settings(chunk=256))
    assert fake_engine.asked == [([512] * 2, 4), ([4000] * 5, 128)]
    assert columns["seconds"] == [pytest.approx(5 * (4000 + 127) / 1000)]
    assert columns["output_tokens_per_second"] == pytest.approx(5 * 128 / 20.635, abs=0.01)
    assert columns["total_tokens_per_second"] == pytest.approx(5 * (4000 + 128) / 20.635, abs=0.1)


@pytest.mark.parametrize(
    ("kind", "cached", "sentence"),
    [
        ("first_token", 16, "16 tokens of a new prompt came from the prefix cache"),
        ("load", 16, "16 tokens of a new prompt came from the prefix cache"),
        ("prefix_hit", 0, "0 of a prompt's tokens came from the prefix cache, not about 750"),
        ("prefix_hit", 752, "752 of a prompt's tokens came from the prefix cache, not about 750"),
    ],
)
def test_a_prompt_that_the_cache_knows_otherwise_than_meant_is_no_result(kind, cached, sentence):
    with pytest.raises(RuntimeError, match=sentence):
        measure(
            Measurement(kind, 1000, 1000),
            lambda prompts, _: [cached for _ in prompts],
            fresh_prompts(4096),
            prefill_settings(),
        )


def test_the_table_of_prefill_has_rates_of_loads_and_dashes_for_what_was_left_out():
    first, load = Measurement("first_token", 8192, 8192).fields(), Measurement("load", 32768, 32768, 32).fields()
    lines = prefill_table(
        [
            {"variant": "flash_attn", **first, "seconds_median": 0.5},
            {"variant": "flash_attn", **load, "seconds_median": 50.0, "total_tokens_per_second": 21053.0},
            {"variant": "unique_prefill", **first, "seconds_median": 0.25},
            {"variant": "unique_prefill", **load, "skipped": "the time limit was reached"},
        ]
    )
    cells = [list(column.cells) for column in lines.columns]
    assert cells[1:] == [["8K", "32K"], ["1", "32"], ["0.500", "50.000 (21,053)"], ["0.250", "-"]]


def test_prefill_gives_each_variant_a_process_and_says_which_failed(monkeypatch, tmp_path, capsys):
    asked = []

    def run_python(module, arguments, seconds):
        settings = PrefillSettings.model_validate_json(arguments[1])
        asked.append((module, arguments[0], settings.variant, settings.contexts, settings.loads, seconds))
        return None if settings.variant == "unique" else 0

    monkeypatch.setattr("bench.serving.variants.run_python", run_python)
    output = tmp_path / "out.jsonl"
    arguments = ["--variant", "flash_attn,unique", "--grid", "8K,32K", "--load", "32K=2", "--time-limit", "100"]
    monkeypatch.setattr(sys, "argv", ["bench", "prefill", *arguments, "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        serving_main()
    assert ended.value.code == 3
    assert "error: unique was not done by the deadline" in capsys.readouterr().out
    assert [each[:5] for each in asked] == [
        ("bench.serving", "prefill-variant", variant, (8192, 32768), parse_loads(["32K=2"]))
        for variant in ("flash_attn", "unique")
    ]
    assert all(each[5] > 100 for each in asked)
    assert read_run(output).rows == []


SERVING = {
    "unknown backend": (["--variant", "fastest"], "variant: got 'fastest', allowed: dense, flash_attn, "),
    "unknown KV cache": (["--variant", "unique:int3"], "variant: got 'unique:int3', allowed: "),
    "wrong settings": (
        ["--variant", "unique", "--additional-config", '{"sparse_attention": {"selection": {"sink_pages": -1}}}'],
        "sparse_attention.selection.sink_pages: got -1, allowed: ",
    ),
    "no model": (
        ["--model", "missing"],
        "model: got 'missing', allowed: needle-8m, llama-3.1-8b, llama-3.1-8b-512k, llama-3.1-8b-1m or ",
    ),
}
DECODE = SERVING | {
    "no batch": (["--grid", "2K="], "grid: got '2K=', allowed: CONTEXT=BATCH,..."),
    "no number": (["--grid", "many=1"], "grid: got 'many=1', allowed: "),
    "batch of none": (["--grid", "2K=0"], "grid: got '2K=0', allowed: "),
    "context twice": (["--grid", "2K=1", "--grid", "2048=2"], "grid: got '2048=2', allowed: "),
    "context twice in one": (["--grid", "2K,2048=1"], "grid: got '2K,2048=1', allowed: "),
    "context too long": (["--grid", "256K=1"], "grid: got a context of 262144 tokens, allowed: from "),
    "context too short": (["--grid", "100=1"], "grid: got a context of 100 tokens, allowed: from "),
    "batch too large": (["--grid", "2K=64"], "grid: got a batch of 64, allowed: at most max_num_seqs = 32"),
}
SERVE = SERVING | {
    "unknown workload": (["--workload", "chat"], "workload: got 'chat', allowed: random, shared_prefix"),
    "load of none": (["--load", "32K=0"], "load: got '32K=0', allowed: CONTEXT=REQUESTS, such as 32K=32"),
    "prompt too long": (["--load", "256K=1"], "load: got a context of 262144 tokens, allowed: from 64 to the model's "),
}


PREFILL = SERVING | {
    "no context": (["--grid", "many"], "grid: got 'many', allowed: "),
    "context too long": (["--grid", "256K"], "grid: got a context of 262144 tokens, allowed: from 256 to the model's "),
    "context too short": (["--grid", "255"], "grid: got a context of 255 tokens, allowed: from 256 to the model's "),
    "no load": (["--load", "32K"], "load: got '32K', allowed: CONTEXT=REQUESTS, such as 32K=32"),
    "load of none": (["--load", "32K=0"], "load: got '32K=0', allowed: CONTEXT=REQUESTS, such as 32K=32"),
    "load too long": (["--load", "256K=1"], "load: got a context of 262144 tokens, allowed: from 256 to the model's "),
}


@pytest.mark.parametrize("case", PREFILL)
def test_prefill_refuses(refused, tmp_path, case):
    arguments, sentence = PREFILL[case]
    found = refused(serving_main, "prefill", "--variant", "unique", "--output", str(tmp_path / "out"), *arguments)
    assert found.startswith(sentence)


@pytest.mark.parametrize("case", DECODE)
def test_decode_refuses(refused, tmp_path, case):
    arguments, sentence = DECODE[case]
    assert refused(serving_main, "decode", "--output", str(tmp_path / "out"), *arguments).startswith(sentence)


@pytest.mark.parametrize("case", SERVE)
def test_serve_refuses(refused, tmp_path, case):
    arguments, sentence = SERVE[case]
    assert refused(serving_main, "serve", "--output", str(tmp_path / "out"), *arguments).startswith(sentence)


def test_a_prompt_of_the_whole_context_leaves_room_for_its_answer():
    with open_model("llama-3.1-8b") as model:
        assert [fit(context, model, 128) for context in (32768, 131072)] == [32768, 131072 - 128 - 16]
    loads = make_loads(["random"], [ClientRow(context=32768, requests=1)], 128, 2)
    assert [(each.input_tokens, each.concurrency, each.requests) for each in loads] == [(32768, 1, 4)]


def test_capacity_refuses_a_cache_that_is_none(refused, tmp_path):
    output = ("capacity", "--output", str(tmp_path / "out"))
    found = refused(serving_main, *output, "--cache-tokens", "some")
    assert found == "cache_tokens: got 'some', allowed: a positive integer or max"
    assert refused(serving_main, *output, "--input-tokens", "131072").startswith("input_tokens: got 131072, allowed ")


@pytest.mark.parametrize("command", ["decode", "serve", "capacity"])
def test_results_that_cannot_be_written_are_refused(refused, tmp_path, command):
    output = tmp_path / "missing" / "out"
    assert refused(serving_main, command, "--output", str(output)) == (
        f"output: got {str(output)!r} (No such file or directory), allowed: a file that can be written"
    )


def test_plot_refuses_what_is_no_result_or_no_picture(refused, tmp_path):
    results = write_results(tmp_path / "decode.jsonl", decode_rows())
    text = tmp_path / "text"
    text.write_text("{}\n")
    plot = ("plot", "--output", str(tmp_path / "out.png"))
    assert refused(serving_main, *plot, str(text)).startswith(f"results: got {str(text)!r}, allowed: ")
    assert refused(serving_main, *plot, str(tmp_path / "missing")).startswith("results: got ")
    assert refused(serving_main, *plot, str(results), "--batch", "5") == (
        "batch: got 0 of the measured batches [1, 6], allowed: 1 to 6 of them"
    )
    picture = str(tmp_path / "out.txt")
    assert refused(serving_main, "plot", str(results), "--output", picture) == (
        f"output: got {picture!r}, allowed: a name that ends in .png or .svg"
    )


QUALITY = {
    "context too short": (["--context", "100"], "context: got 100 tokens, allowed: from 4096 to the model's 32768"),
    "unknown task": (["--task", "riddle"], "task: got 'riddle', allowed: single, "),
    "no questions": (["--questions", "0"], "questions: got 0, allowed: 1 or more"),
}
ACCURACY = QUALITY | {
    "sparse as dense": (["--dense", "unique"], "dense: got 'unique', allowed: a backend of vLLM"),
    "dense as sparse": (["--sparse", "flash_attn"], "sparse: got 'flash_attn', allowed: a backend of the plugin"),
    "unknown format": (["--statistics", "int3"], "sparse_attention.selection.statistics: got 'int3', allowed: "),
    "no budget": (["--pages", "1"], "sparse_attention.selection.budget_tokens: got 8, allowed: "),
}


@pytest.mark.parametrize("case", ACCURACY)
def test_accuracy_refuses(refused, tmp_path, case):
    arguments, sentence = ACCURACY[case]
    assert refused(quality_main, "accuracy", "--output", str(tmp_path / "out"), *arguments).startswith(sentence)


def test_accuracy_measures_every_budget_and_format():
    found = all_settings(["dense"], ["unique"], [64, 8], ["int8", "bf16"])
    names = ["dense", "unique int8 64", "unique int8 8", "unique bf16 64", "unique bf16 8"]
    assert [setting.name for setting in found] == names
    assert json.loads(found[2].additional_config)["sparse_attention"]["selection"]["budget_tokens"] == 64
    rows = [
        {
            "setting": setting.name,
            "variant": setting.variant.name,
            "statistics": setting.statistics,
            "budget_pages": setting.pages,
            "task": "kv",
            "context_tokens": 4096,
            "questions": 8,
            "correct": i,
        }
        for i, setting in enumerate(found)
    ]
    first, second = accuracy_tables(rows)
    assert [column.header for column in first.columns] == ["context", "task", "dense", "64 pages", "8 pages"]
    assert [list(column.cells) for column in second.columns][2:] == [["0/8"], ["3/8"], ["4/8"]]


def test_after_a_failure_the_engines_behind_it_are_still_asked():
    found = all_settings(["dense"], ["unique"], [64, 8], ["int8"])
    rows = [{"setting": "dense"}] * 2 + [{"setting": "unique int8 64"}]
    assert unfinished(found, rows, 2) == 1
    assert unfinished(found, rows * 2, 2) == 2
    assert unfinished(found[:1], rows, 2) == 0


def test_shapes_have_what_is_read_of_a_model():
    for name in SHAPES:
        with open_model(name) as model:
            assert model.prefill_flops(0, 1024) < model.prefill_flops(0, 2048) / 2


def test_compaction_takes_what_the_first_steps_behind_a_prompt_do_beyond_later_ones():
    def timed(asked: float, step: float, longest: float) -> Timed:
        # The other request decoded three tokens while the prompt was computed.
        first = asked + 2.0
        steps = [longest, step, step, step, *[step] * 24]
        beside = [asked + 0.5, asked + 1.0, first]
        for gap in steps:
            beside.append(beside[-1] + gap)
        return Timed(asked, [first, *beside[3:]], beside)

    row = compaction_columns([timed(10.0, 0.01, 0.015), timed(20.0, 0.01, 0.017), timed(30.0, 0.01, 0.05)])
    assert row == pytest.approx(
        {"prefill_seconds": 2.0, "step_ms": 10.0, "compaction_ms": 7.0, "pause_ms": 7.0, "share_of_prefill": 0.0035,
         "pause_in_steps": 0.7}
    )  # fmt: skip


def lossless_settings(**changes) -> LosslessSettings:
    values = {
        "model": "llama-3.1-8b",
        "backend": "unique",
        "draft_tokens": 3,
        "draft_length": "fixed",
        "min_context_tokens": 0,
        "budget_tokens": 1024,
        "acceptance": (0.9, None),
        "grid": parse_grid(["32K=1,8"]),
        "new_tokens": 6,
        "repeats": 2,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.9,
        "block_size": None,
        "output": "unused",
    }
    return LosslessSettings(**values | changes)


class SteppingEngine:
    """Emits one token of each request in its first step, then two; three for the first request."""

    def __init__(self):
        self.tokens, self.most, self.aborted = {}, None, []

    def add_request(self, name, prompt, sampling):
        self.tokens[name], self.most = 0, sampling.max_tokens

    def step(self):
        for number, name in enumerate(self.tokens):
            self.tokens[name] += min(self.tokens[name] + 1, 3 if number == 0 else 2)
        done = {name: self.tokens[name] >= self.most for name in self.tokens}
        return [
            SimpleNamespace(request_id=name, finished=done[name], outputs=[SimpleNamespace(token_ids=[0] * tokens)])
            for name, tokens in self.tokens.items()
        ]

    def abort_request(self, names):
        self.aborted += names
        self.tokens.clear()

    def has_unfinished_requests(self):
        return bool(self.tokens)


def test_time_is_divided_by_the_tokens_that_came_out_of_whole_steps():
    engine = SteppingEngine()
    found = measure_requests(engine, [[1], [2]], lossless_settings())
    assert found["tokens_per_step"] == 2.5
    assert found["ms_per_step"] / found["ms_per_token"] == pytest.approx(2.5, rel=0.3)
    assert len(engine.aborted) == 2
    with pytest.raises(RuntimeError, match="a request ended after"):
        measure_requests(SteppingEngine(), [[1]], lossless_settings(new_tokens=1).model_copy(update={"repeats": 500}))


def test_lossless_mode_is_compared_with_dense_decoding_of_the_same_batch():
    about = {"context_tokens": 32768, "batch": 8}
    times = {"tokens_per_step": 4.0, "ms_per_step": 20.0}
    lines = lossless_table(
        [
            about | times | {"draft_tokens": None, "acceptance": None, "ms_per_token": 10.0},
            about | times | {"draft_tokens": 8, "acceptance": 0.9, "ms_per_token": 4.0},
            about | times | {"draft_tokens": 8, "acceptance": None, "ms_per_token": 5.0, "draft_length": "adaptive"},
            about | {"draft_tokens": 8, "acceptance": 0.95, "skipped": "no room"},
        ]
    )
    cells = [list(column.cells) for column in lines.columns]
    assert cells[-1] == ["-", "2.50", "2.00", "-"]
    assert cells[2] == ["-", "8", "up to 8", "8"]
    assert cells[3] == ["-", "0.9", "model", "0.95"]
    assert json.loads(lossless_settings().additional_config)["sparse_attention"]["lossless"]["draft_tokens"] == 3
    assert lossless_settings(draft_tokens=None).additional_config is None
    adaptive = lossless_settings(draft_length="adaptive", min_context_tokens=8192)
    assert '"draft_length": "adaptive", "min_context_tokens": 8192' in adaptive.additional_config
    assert adaptive.room > lossless_settings().room


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--acceptance", "0.9,1.5"), "acceptance: got '1.5', allowed: numbers from 0 to 1, or model"),
        (("--grid", "1K=1"), "grid: got a context of 1024 tokens, allowed: from "),
        (("--grid", "32K=25"), "grid: got a batch of 25, allowed: at most max_num_seqs = 24"),
    ],
)
def test_lossless_refuses(refused, tmp_path, arguments, sentence):
    given = ("lossless", *arguments, "--new-tokens", "200", "--output", str(tmp_path / "lossless.jsonl"))
    assert refused(serving_main, *given).startswith(sentence)
