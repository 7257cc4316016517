"""Measured decode steps, lossless mode, prefill and servers."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.common.engine import Variant, engine
from bench.common.models import SHAPES, open_model
from bench.common.results import ResultFile, read_run
from bench.serving import decode, lossless, prefill, serve
from bench.serving.__main__ import main as serving_main
from bench.serving.batches import TAIL, Prompt, Runner, draw_text, make_prompts, parse_batches
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.server import ServerError

OURS = {"model": "llama-3.1-8b", "variant": "unique", "additional_config": None, "engine_args": {}, "repeats": 3}
WRONG = '{"sparse_attention": {"selection": {"sink_pages": -1}}}'
REFUSED = [
    ("decode", ["--variant", "fastest"], "variant: got 'fastest', allowed: dense, flash_attn, "),
    ("decode", ["--variant", "unique:int3"], "variant: got 'unique:int3', allowed: "),
    ("decode", ["--additional-config", WRONG], "sparse_attention.selection.sink_pages: got -1, allowed: "),
    ("decode", ["--model", "missing"], f"model: got 'missing', allowed: needle-8m, {', '.join(SHAPES)} or "),
    ("decode", ["--load", "2K="], "load: got '2K=', allowed: COUNTxCONTEXT"),
    ("decode", ["--load", "1x256K"], "load: got a context of 262144 tokens, allowed: from "),
    ("decode", ["--load", "1x600"], "load: got a context of 600 tokens, allowed: from 640, "),
    (
        "decode",
        ["--load", "64x2K", "--engine-args", '{"max_num_seqs": 32}'],
        "load: got 64 requests, allowed: at most ",
    ),
    ("serve", ["--workload", "chat"], "workload: got 'chat', allowed: random, shared_prefix"),
    ("serve", ["--load", "32K=0"], "load: got '32K=0', allowed: CONTEXT=REQUESTS, such as 32K=32"),
    ("serve", ["--load", "256K=1"], "load: got a context of 262144 tokens, allowed: from 64 to the model's "),
    ("serve", ["--output", "/missing/out"], "output: got '/missing/out' (No such file or directory), allowed: a file "),
    ("prefill", ["--grid", "many"], "grid: got 'many', allowed: "),
    ("prefill", ["--grid", "255"], "grid: got a context of 255 tokens, allowed: from 256 to the model's "),
    ("lossless", ["--acceptance", "0.9,1.5"], "acceptance: got '1.5', allowed: numbers from 0 to 1, or model"),
    ("lossless", ["--load", "1x1K", "--new-tokens", "200"], "load: got a context of 1024 tokens, allowed: "),
]


@pytest.mark.parametrize(("command", "arguments", "sentence"), REFUSED)
def test_bad_input_is_refused(refused, tmp_path, command, arguments, sentence):
    assert refused(serving_main, command, "--output", str(tmp_path / "out"), *arguments).startswith(sentence)


def run(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        serving_main()
    return int(ended.value.code or 0)


def test_batches_are_parsed_from_their_names():
    (mixed,) = parse_batches(["2x2K:budget=512+16x32K+1x128K:dense"])
    assert (mixed.count, mixed.longest, mixed.tokens) == (19, 131072, 16 * 32768 + 131072 + 4096)
    assert mixed.arguments == ({"sparse": "dense"}, *[{}] * 16, *[{"sparse_budget_tokens": 512}] * 2)
    for text in ("", "32K", "x32K", "2x", "2x32K:sparse", "2x32K:budget", "2x32K:coverage=0.9"):
        with pytest.raises(ConfigurationError, match="allowed: COUNTxCONTEXT"):
            parse_batches([text])


def test_prompts_share_a_text_and_end_differently():
    batches = parse_batches(["3x1K+1x2K"])
    with open_model("llama-3.1-8b") as model:
        text, tails = draw_text(model, batches)
    prompts = make_prompts(batches[0], text, tails, 100)
    assert [len(each.tokens) for each in prompts] == [1947, 923, 923, 923]
    assert len({tuple(each.tokens[-TAIL:]) for each in prompts}) == 4
    assert all(each.tokens[:-TAIL] == text[: len(each.tokens) - TAIL] for each in prompts)
    assert len({each.salt for each in prompts}) == 4


class Clock:
    """Takes 5 s and 2 ms per token; the second time that is measured takes 4 ms longer."""

    block_size = 16

    def __init__(self, cached):
        self.now, self.asked, self.cached = 0.0, [], cached

    def fill(self, batch, prompts):
        return {"cache": "text"}

    def generate(self, batch, prompts, tokens):
        self.asked.append(tokens)
        self.now += 5 + tokens * 0.002 + (0.004 if len(self.asked) == 4 else 0)
        return [SimpleNamespace(num_cached_tokens=self.cached) for _ in prompts]


@pytest.mark.parametrize("cached", [992, 16])
def test_times_are_differences_over_new_tokens_and_exclude_prefill(monkeypatch, cached):
    runner, batches = Clock(cached), parse_batches(["2x1K"])
    monkeypatch.setattr("bench.serving.decode.time.perf_counter", lambda: runner.now)
    settings = decode.DecodeSettings(**OURS, loads=batches, new_tokens=4, compile=True)
    arguments = runner, batches[0], [Prompt([1] * 1000, "0")] * 2, settings
    if cached == 16:
        with pytest.raises(RuntimeError, match="16 of a prompt's 1000 tokens came from the prefix cache"):
            decode.measure_batch(*arguments)
        return
    columns = decode.measure_batch(*arguments)
    assert runner.asked == [5, 5, 1, 5, 1, 5, 1]
    assert columns["ms_per_token"] == columns["ms_per_token_min"] == pytest.approx(2)
    assert columns["ms_per_token_max"] == pytest.approx(3)
    assert (columns["new_tokens"], columns["repeats"], columns["cache"]) == (4, 3, "text")


def test_rivals_measure_a_batch_once_whatever_its_arguments(monkeypatch, tmp_path, capsys):
    asked = []

    @contextmanager
    def start(model, variant, config, **options):
        asked.append((variant.name, options["compilation_config"], options["max_num_seqs"], options["max_model_len"]))
        yield SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=1025),
            scheduler_config=SimpleNamespace(max_num_seqs=256), model_config=SimpleNamespace(max_model_len=3072),
            compilation_config=SimpleNamespace(mode=3, cudagraph_mode=None),
        ))), "SOME"  # fmt: skip

    def measure(runner, batch, *_):
        asked.append(batch.name)
        if batch.name == "1x3K":
            raise RuntimeError("not cached")
        return {"ms_per_token": 1.0, "ms_per_token_min": 1.0, "ms_per_token_max": 1.5}

    def run_here(_module, arguments, _seconds):
        return run(monkeypatch, *arguments)

    monkeypatch.setattr(decode, "engine", start)
    monkeypatch.setattr(decode, "measure_batch", measure)
    monkeypatch.setattr("bench.serving.variants.run_python", run_here)
    output = tmp_path / "out.jsonl"
    loads = ["--load", "1x2K,1x2K:dense,1x3K,9x2K", "--engine-args", '{"max_num_seqs": 64}']
    assert run(monkeypatch, "decode", "--variant", "flash_attn,unique", *loads, "--output", output) == 0
    assert asked == [
        ("flash_attn", None, 64, 3072), "1x3K", "1x2K", ("unique", None, 64, 3072), "1x3K", "1x2K", "1x2K:dense",
    ]  # fmt: skip
    rows = read_run(output).rows
    assert [row.get("skipped") for row in rows[:4]] == ["not cached", "the KV cache holds 16384 tokens", None, None]
    assert [row["budget_tokens"] for row in (rows[0], rows[4])] == [None, 1024]
    assert {(row["weights"], row["compile_mode"], row["max_num_seqs"]) for row in rows} == {("drawn", 3, 256)}
    assert "1.00 (1.00 to 1.50)  1.00x" in capsys.readouterr().out


def test_copied_prompts_have_the_cache_of_the_computed_one():
    """Keys, values and page statistics of copies have the bytes that the model wrote."""
    options = {"skip_tokenizer_init": True, "max_model_len": 1024, "enable_prefix_caching": True}
    with open_model("needle-8m") as model, engine(model, Variant.parse("unique"), None, **options) as (llm, _):
        runner, (batch,) = Runner(llm, sparse=True), parse_batches(["1x1K+2x768:budget=256"])
        prompts = make_prompts(batch, *draw_text(model, [batch]), 32)
        assert runner.fill(batch, prompts)["cache"] == "text, one prompt copied"
        outputs = runner.generate(batch, prompts, 32)
        (caches,) = llm.collective_rpc(lambda worker: list(worker.block_rows()))
        computed, *copied = (runner.blocks_of(Prompt(each.tokens[:-TAIL], each.salt)) for each in prompts)
        for prompt, output, blocks in zip(prompts[1:], outputs[1:], copied, strict=True):
            assert len(blocks) == (len(prompt.tokens) - TAIL) // runner.block_size
            assert not set(blocks) & set(computed)
            assert output.num_cached_tokens >= len(prompt.tokens) - runner.block_size
            for rows in caches:
                assert torch.equal(rows[blocks], rows[computed[: len(blocks)]])


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


def test_dense_decoding_and_drafts_get_the_same_prompts(monkeypatch, tmp_path):
    found = []
    monkeypatch.setattr(lossless, "measure_variants", lambda settings, *_: found.extend(settings))
    config = json.dumps({"sparse_attention": {"selection": {"budget_tokens": 2048}, "lossless": {"score_every": 4}}})
    arguments = ["--draft-tokens", "4,12", "--adaptive", "--additional-config", config, "--new-tokens", 6]
    assert run(monkeypatch, "lossless", *arguments, "--repeats", 2, "--output", tmp_path / "out.jsonl") == 0
    assert [(each.variant, each.draft_tokens) for each in found] == [
        ("flash_attn", None), ("lossless", 4), ("lossless", 12),
    ]  # fmt: skip
    assert len({each.room for each in found}) == 1
    assert found[0].additional_config is None
    assert json.loads(found[1].additional_config)["sparse_attention"] == {
        "selection": {"budget_tokens": 2048},
        "lossless": {"score_every": 4, "draft_tokens": 4, "draft_length": "adaptive"},
    }
    # Time is divided by the tokens that came out of whole steps.
    steps, settings = SteppingEngine(), found[1].model_copy(update={"draft_length": "fixed"})
    times = lossless.measure_requests(steps, [[1], [2]], settings)
    assert times["tokens_per_step"] == 2.5
    assert times["ms_per_step"] / times["ms_per_token"] == pytest.approx(2.5, rel=0.3)
    assert len(steps.aborted) == 2
    with pytest.raises(RuntimeError, match="a request ended after"):
        lossless.measure_requests(SteppingEngine(), [[1]], settings.model_copy(update={"repeats": 500}))


@pytest.mark.parametrize(("kind", "lengths", "cached"), [("first_token", [512], 0), ("prefix_hit", [384, 512], 384)])
def test_the_first_prompt_of_a_context_does_not_count(monkeypatch, kind, lengths, cached):
    asked = []

    def ask(prompt):
        asked.append(prompt)
        return cached

    # The n-th prompt takes n seconds; those that fill the prefix cache do not count either.
    monkeypatch.setattr("bench.serving.prefill.time.perf_counter", lambda: sum(range(1, len(asked) + 1)))
    columns = prefill.measure(kind, 512, ask, prefill.fresh_prompts(4096), 3)
    assert [len(prompt) for prompt in asked] == lengths * 4
    seconds = [len(lengths) * number for number in (2, 3, 4)]
    assert columns == {"cached_tokens": cached, "seconds": seconds, "seconds_median": seconds[1]}
    assert len({prompt[0] for prompt in asked}) == 4


@pytest.mark.parametrize(("kind", "cached"), [("first_token", 16), ("prefix_hit", 0), ("prefix_hit", 752)])
def test_a_prompt_that_the_cache_knows_otherwise_than_meant_is_no_result(kind, cached):
    with pytest.raises(RuntimeError, match=f"{cached} of a prompt's tokens came from the prefix cache, not about"):
        prefill.measure(kind, 1000, lambda _: cached, prefill.fresh_prompts(4096), 1)


def test_each_variant_gets_a_process_and_a_failure_is_named(monkeypatch, tmp_path, capsys):
    def run_python(module, arguments, seconds):
        settings = prefill.PrefillSettings.model_validate_json(arguments[2])
        assert (module, settings.contexts) == ("bench.serving", (32768, 8192))
        assert 0 < seconds <= 100
        if settings.variant == "flash_attn":
            with ResultFile(Path(arguments[3])) as file:
                about = {"variant": "flash_attn", "measurement": "first_token", "context_tokens": 8192}
                file.write(about | {"seconds_median": 0.5})
        return {"flash_attn": 0, "unique": None, "quest": 3}[settings.variant]

    monkeypatch.setattr("bench.serving.variants.run_python", run_python)
    arguments = ["--variant", "flash_attn,unique,quest", "--grid", "32K,8K", "--time-limit", "100"]
    assert run(monkeypatch, "prefill", *arguments, "--output", tmp_path / "out.jsonl") == 3
    shown = capsys.readouterr()
    assert shown.err == "error: unique was not done by the deadline\nerror: quest ended with exit code 3\n"
    assert "0.500" in shown.out
    assert len(read_run(tmp_path / "out.jsonl").rows) == 1


RESULT = {
    "duration": 12.5, "completed": 4, "total_output_tokens": 512, "output_throughput": 81.92,
    "total_token_throughput": 21053.44,
} | {
    f"{kind}_{metric}_ms": value
    for metric, value in (("ttft", 1640.25), ("tpot", 12.5), ("itl", 12.25))
    for kind in ("mean", "median", "p90", "p99")
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"completed": 3}, "3 of 4 requests completed"),
        ({"total_output_tokens": 500}, "the answers have 500 tokens, not 512"),
        ({"p99_itl_ms": None}, "the result lacks 'p99_itl_ms'"),
    ],
)
def test_a_result_without_whole_answers_or_columns_is_refused(change, sentence):
    load = serve.Load("random", 32768, 128, 2, 4, 1)
    columns = serve.parse_result(RESULT, load)
    assert (columns["ttft_ms_median"], columns["tpot_ms_p99"], columns["output_tokens_per_second"]) == (
        1640.25, 12.5, 81.92,
    )  # fmt: skip
    with pytest.raises(ValueError, match=sentence):
        serve.parse_result({key: value for key, value in (RESULT | change).items() if value is not None}, load)


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
    shared = ["serve", "--workload", "random", "--output", output]
    arguments = ["--variant", "dense,unique,sinkrouter:fp8", "--load", "1K=2", "--cache-tokens", "4096"]
    assert run(monkeypatch, *shared, *arguments) == 3
    shown = capsys.readouterr()
    assert "error: the unique server ended" in shown.err
    assert "1640.25" in shown.out
    rows = read_run(output).rows
    assert [(row["variant"], row["compiled"], row["cache_tokens"]) for row in rows] == [
        ("dense", True, 4096), ("sinkrouter:fp8", True, 4096),
    ]  # fmt: skip
    assert rows[1]["additional_config"]["sparse_attention"]["routing"]["accept"] == "uncalibrated"
    assert asked == [1024, 1024]
    option = "--kv-cache-memory-bytes"
    memory = {name: int(each.arguments[each.arguments.index(option) + 1]) for name, each in servers.items()}
    assert memory == {"dense": 2**29, "unique": 2**29, "sinkrouter-fp8": 2**28}
    assert run(monkeypatch, *shared, "--variant", "dense", "--load", "1K=3") == 3
    shown = capsys.readouterr()
    assert "exit code 1" in shown.err
    assert shown.err.endswith("no such dataset\n")
