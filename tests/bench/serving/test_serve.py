"""Servers under load."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.common.models import open_model
from bench.common.options import ClientRow
from bench.common.results import read_run
from bench.serving import serve
from bench.serving.__main__ import main as serving_main
from vllm_sparse_plugin.tools.server import ServerError

RESULT = {
    "duration": 12.5,
    "completed": 4,
    "total_output_tokens": 512,
    "output_throughput": 81.92,
    "total_token_throughput": 21053.44,
} | {
    f"{kind}_{metric}_ms": value
    for metric, value in (("ttft", 1640.25), ("tpot", 12.5), ("itl", 12.25))
    for kind in ("mean", "median", "p90", "p99")
}
MEASURED = serve.Load("random", 32768, 128, 2, 4, 1)


def test_the_result_of_vllm_bench_serve_becomes_columns():
    columns = serve.parse_result(RESULT, MEASURED)
    assert (columns["ttft_ms_median"], columns["tpot_ms_p99"], columns["itl_ms_mean"]) == (1640.25, 12.5, 12.25)
    assert (columns["completed"], columns["seconds"], columns["output_tokens_per_second"]) == (4, 12.5, 81.92)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"completed": 3}, "3 of 4 requests completed"),
        ({"total_output_tokens": 500}, "the answers have 500 tokens, not 512"),
        ({"p99_itl_ms": None}, "the result lacks 'p99_itl_ms'"),
    ],
)
def test_a_result_without_whole_answers_or_columns_is_refused(change, sentence):
    result = {key: value for key, value in (RESULT | change).items() if value is not None}
    with pytest.raises(ValueError, match=sentence):
        serve.parse_result(result, MEASURED)


def test_loads_are_arguments_of_vllm_bench_serve():
    with open_model("llama-3.1-8b") as model:
        clients = [ClientRow(context=size, requests=count) for size, count in ((32768, 8), (131072, 1))]
        loads = serve.make_loads(serve.WORKLOADS, clients, 128, 2, model)
    assert [(each.input_tokens, each.requests) for each in loads[:2]] == [(32768, 16), (131072 - 128 - 16, 4)]
    alone, shared = loads[0].arguments(), loads[2].arguments()
    assert alone[alone.index("--random-input-len") + 1] == "32768"
    assert alone[alone.index("--max-concurrency") + 1] == "8"
    assert "--num-warmups" not in alone  # its prompt would be one of the measured ones
    lengths = [int(shared[shared.index(f"--prefix-repetition-{part}-len") + 1]) for part in ("prefix", "suffix")]
    assert lengths == [31744, 1024]
    assert "--num-warmups" in shared
    assert len({each.seed for each in loads}) == 4


def test_a_watch_has_the_most_that_it_has_seen(monkeypatch):
    texts = iter(
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}\nvllm:num_preemptions_total{{engine="0"}} {preemptions}\n'
        for running, usage, preemptions in ((2, 0.5, 3), (4, 0.9, 5), (9, 0.25, 6))
    )
    monkeypatch.setattr(serve, "metrics_text", lambda client: next(texts))
    with serve.watch(None) as looks:
        looks.append(serve.read_metrics(next(texts)))
    assert serve.watched_columns(looks) == {
        "running_most": 9, "kv_cache_usage_most": 0.9, "preemptions": 3,
    }  # fmt: skip
    assert serve.watched_columns([])["preemptions"] == 0


def test_each_variant_gets_a_server_and_a_failure_costs_no_other_row(monkeypatch, tmp_path, capsys):
    servers, asked = {}, []

    @contextmanager
    def run_server(name, settings, _console):
        servers[name] = settings
        if name == "unique":
            raise ServerError("the unique server ended")
        completions = SimpleNamespace(create=lambda **body: asked.append(len(body["prompt"])))
        yield SimpleNamespace(base_url="http://127.0.0.1:1/v1/", completions=completions)

    def run_python(module, arguments, seconds, log):
        assert module == "vllm_sparse_plugin"
        folder = Path(arguments[arguments.index("--result-dir") + 1])
        if arguments[arguments.index("--max-concurrency") + 1] == "2":
            (folder / "result.json").write_text(json.dumps(RESULT))
            return 0
        log.write_text("no such dataset\n")
        return 1

    monkeypatch.setattr(serve, "run_server", run_server)
    monkeypatch.setattr(serve, "run_python", run_python)
    monkeypatch.setattr(serve, "prepare_server", lambda *_: "SOME")
    monkeypatch.setattr(serve, "metrics_text", lambda client: "")
    output = tmp_path / "out.jsonl"

    def ask(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench", "serve", "--output", str(output), *arguments])
        with pytest.raises(SystemExit) as ended:
            serving_main()
        return ended.value.code, capsys.readouterr()

    more = ("--workload", "random", "--cache-tokens", "4096")
    code, shown = ask("--variant", "dense,unique,sinkrouter:fp8", "--load", "1K=2", *more)
    assert code == 3
    assert "error: the unique server ended" in shown.err
    assert "12.50" in shown.out
    rows = read_run(output).rows
    assert [(row["variant"], row["compiled"], row["cache_tokens"]) for row in rows] == [
        ("dense", True, 4096), ("sinkrouter:fp8", True, 4096),
    ]  # fmt: skip
    assert rows[1]["additional_config"]["sparse_attention"]["routing"]["accept"] == "uncalibrated"
    assert asked == [1024, 1024]
    option = "--kv-cache-memory-bytes"
    memory = {name: int(each.arguments[each.arguments.index(option) + 1]) for name, each in servers.items()}
    assert memory == {"dense": 2**29, "unique": 2**29, "sinkrouter-fp8": 2**28}
    monkeypatch.setattr(serve, "run_server", lambda *_: run_server("again", None, None))
    code, shown = ask("--workload", "random", "--variant", "dense", "--load", "1K=3")
    assert code == 3
    assert "exit code 1" in shown.err
    assert shown.err.endswith("no such dataset\n")
