"""Measured decode steps."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from support.bench.serving import settings

from bench.common.engine import Variant, engine
from bench.common.models import open_model
from bench.common.results import read_run
from bench.serving import decode
from bench.serving.__main__ import main as serving_main
from bench.serving.batches import TAIL, Prompt, Runner, draw_text, make_prompts, parse_batches
from vllm_sparse_plugin.errors import ConfigurationError


def test_batches_are_parsed_from_their_names():
    (mixed,) = parse_batches(["2x2K:budget=512+16x32K+1x128K:dense"])
    assert (mixed.count, mixed.longest, mixed.tokens) == (19, 131072, 16 * 32768 + 131072 + 4096)
    assert [part.arguments for part in mixed.parts] == [
        {"sparse": "dense"}, {}, {"sparse_budget_tokens": 512},
    ]  # fmt: skip
    assert mixed.contexts[:2] == [131072, 32768]


@pytest.mark.parametrize("text", ["", "32K", "x32K", "2x", "2x32K:sparse", "2x32K:budget", "2x32K:coverage=0.9"])
def test_what_is_no_batch_is_refused(text):
    with pytest.raises(ConfigurationError, match="allowed: COUNTxCONTEXT"):
        parse_batches([text])


def test_the_forecast_counts_the_longest_prompt_once():
    with open_model("llama-3.1-8b") as model:
        one, two, dense = (
            decode.forecast_seconds(model, settings(variant=variant, loads=parse_batches([load])))
            for variant, load in (("unique", "1x128K"), ("unique", "2x128K"), ("flash_attn", "2x128K"))
        )
        plain = decode.forecast_seconds(model, settings(loads=parse_batches(["2x128K", "2x128K:dense"])))
    assert one < two < one + 1
    assert dense == plain
    assert dense > two


def test_prompts_share_a_text_and_end_differently():
    with open_model("llama-3.1-8b") as model:
        text, tails = draw_text(model, 2048, 4)
    (batch,) = parse_batches(["3x1K+1x2K"])
    prompts = make_prompts(batch, text, tails, 100)
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


def measured(monkeypatch, cached):
    runner = Clock(cached)
    monkeypatch.setattr("bench.serving.decode.time.perf_counter", lambda: runner.now)
    (batch,) = parse_batches(["2x1K"])
    prompts = [Prompt([1] * 1000, "0")] * 2
    return runner.asked, decode.measure_batch(runner, batch, prompts, settings())


def test_times_are_differences_over_new_tokens(monkeypatch):
    asked, columns = measured(monkeypatch, 992)
    assert asked == [5, 5, 1, 5, 1, 5, 1]
    assert columns["ms_per_token"] == columns["ms_per_token_min"] == pytest.approx(2)
    assert columns["ms_per_token_max"] == pytest.approx(3)
    assert (columns["new_tokens"], columns["repeats"], columns["cache"]) == (4, 3, "text")


def test_a_time_that_includes_prefill_is_no_result(monkeypatch):
    with pytest.raises(RuntimeError, match="16 of a prompt's 1000 tokens came from the prefix cache"):
        measured(monkeypatch, 16)


def test_rivals_measure_a_batch_once_whatever_its_arguments(monkeypatch, tmp_path):
    asked = []

    @contextmanager
    def start(model, variant, config, **options):
        asked.append((variant.name, options["compilation_config"], options["max_num_seqs"]))
        cache = SimpleNamespace(block_size=16, num_gpu_blocks=1025)
        yield SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(
            cache_config=cache, scheduler_config=SimpleNamespace(max_num_seqs=256),
            compilation_config=SimpleNamespace(mode=3, cudagraph_mode=None),
        ))), "SOME"  # fmt: skip

    def measure(runner, batch, *_):
        asked.append(batch.name)
        if batch.name == "1x3K":
            raise RuntimeError("not cached")
        return {"ms_per_token": 1.0, "ms_per_token_min": 1.0, "ms_per_token_max": 1.5}

    def run_here(_module, arguments, _seconds):
        decode.decode_variant(arguments[1])
        return 0

    monkeypatch.setattr(decode, "engine", start)
    monkeypatch.setattr(decode, "measure_batch", measure)
    monkeypatch.setattr("bench.serving.variants.run_python", run_here)
    output = tmp_path / "out.jsonl"
    loads = "1x2K,1x2K:dense,1x3K,9x2K"
    arguments = ["decode", "--variant", "flash_attn,unique", "--load", loads, "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        serving_main()
    assert not ended.value.code
    assert asked == [
        ("flash_attn", None, None), "1x3K", "1x2K", ("unique", None, None), "1x3K", "1x2K", "1x2K:dense",
    ]  # fmt: skip
    rows = read_run(output).rows
    assert [row.get("skipped") for row in rows[:4]] == ["not cached", "the KV cache holds 16384 tokens", None, None]
    assert [row["budget_tokens"] for row in (rows[0], rows[4])] == [None, 1024]
    assert {(row["weights"], row["compile_mode"], row["max_num_seqs"]) for row in rows} == {("drawn", 3, 256)}
    lines = decode.table(rows)
    assert [list(column.cells) for column in lines.columns][1][2] == "1.00 (1.00 to 1.50)"


def test_a_copied_prompt_is_answered_like_a_computed_one(monkeypatch):
    """Tokens after a copy are those after a prefill, so keys, values and page statistics are those of the model."""
    options = {"skip_tokenizer_init": True, "max_model_len": 2048, "enable_prefix_caching": True}
    with open_model("needle-8m") as model, engine(model, Variant.parse("unique"), None, **options) as (llm, _):
        runner = Runner(llm, sparse=True)
        batch, shorter = parse_batches(["1x2K+2x1536:budget=256", "3x1K"])
        drawn = draw_text(model, 2048, 3)
        prompts = make_prompts(batch, *drawn, 32)
        assert runner.fill(batch, prompts)["cache"] == "text, one prompt copied"
        copied = runner.generate(batch, prompts, 32)
        block = llm.llm_engine.vllm_config.cache_config.block_size
        lengths = [len(each.tokens) for each in prompts]
        assert all(each.num_cached_tokens >= length - block for each, length in zip(copied, lengths, strict=True))
        # The cache has the beginnings of shorter prompts.
        monkeypatch.setattr(llm, "collective_rpc", None)
        assert runner.fill(shorter, make_prompts(shorter, *drawn, 32))["cache"] == "text, one prompt copied"
        assert llm.reset_prefix_cache()
        computed = runner.generate(batch, prompts, 32)
    assert [found.num_cached_tokens for found in computed] == [0, 0, 0]
    answers = [[tuple(found.outputs[0].token_ids) for found in each] for each in (copied, computed)]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 3
