"""Measured prefill."""

import sys
from contextlib import contextmanager

import pytest

from bench.common.options import parse_loads
from bench.common.results import read_run
from bench.serving.__main__ import main as serving_main
from bench.serving.prefill import Measurement, PrefillSettings, fresh_prompts, measure, plan, read_shares
from bench.serving.prefill import table as prefill_table


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


def test_no_prompt_on_a_cpu_begins_like_another_one_of_its_server(monkeypatch, tmp_path):
    prompts = {}

    @contextmanager
    def run_server(name, _settings, _console):
        yield prompts.setdefault(name, [])

    def measure(client, prompt):
        client.append(tuple(prompt[:17]))
        return {"prefill_seconds": 0.5}

    monkeypatch.setattr("bench.serving.prefill_cpu.run_server", run_server)
    monkeypatch.setattr("bench.serving.prefill_cpu.measure", measure)
    arguments = ["--context", "1K,4K", "--repeats", "2", "--output", str(tmp_path / "out.jsonl")]
    monkeypatch.setattr(sys, "argv", ["bench", "prefill-cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        serving_main()
    assert not ended.value.code
    assert prompts.keys() == {"dense", "unique"}
    assert all(len(set(beginnings)) == len(beginnings) == 4 for beginnings in prompts.values())


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


def test_rows_say_what_prompts_have_read():
    density, pairs = "vllm_sparse_prefill_density", "vllm_sparse_prefill_pairs"
    before = {density: (50.0, 100), "vllm_sparse_kv_read_share": (1.0, 2)}
    after = {density: (80.0, 200), pairs: (30.0, 40), "vllm_sparse_kv_read_share": (2.0, 4)}
    assert read_shares([(before, after)]) == {"prefill_density": 0.3, "prefill_pairs": 0.75}
    assert read_shares([(before, after), (after, {density: (150.0, 300), pairs: (30.0, 40)})]) == {
        "prefill_density": 0.5, "prefill_pairs": 0.75,
    }  # fmt: skip
    assert read_shares([(after, after)]) == {}


@pytest.mark.parametrize("kind", ["first_token", "prefix_hit", "load"])
def test_prompts_that_are_not_timed_do_not_count_as_read(fake_engine, monkeypatch, kind):
    totals = [0.0, 0]

    def generate(prompts, tokens):
        # Prompts of the full length read a tenth; shorter ones, which warm up or fill the prefix cache, everything.
        totals[0] += 1.0 if len(prompts[0]) == 1000 else 10.0
        totals[1] += 10
        return fake_engine.generate(prompts, tokens)

    monkeypatch.setattr(
        "bench.serving.prefill.count_totals", lambda: {"vllm_sparse_prefill_density": (totals[0], totals[1])}
    )
    columns = measure(Measurement(kind, 1000, 1000, 3), generate, fresh_prompts(4096), prefill_settings(chunk=256))
    assert columns["prefill_density"] == 0.1


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
