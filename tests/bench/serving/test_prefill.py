"""Measured prefill."""

import sys
from pathlib import Path

import pytest

from bench.common.results import ResultFile, read_run
from bench.serving import prefill
from bench.serving.__main__ import main as serving_main


class FakeEngine:
    """Computes 1000 tokens per second of its own clock, and caches prompts in blocks of 16 tokens."""

    def __init__(self, monkeypatch):
        self.now, self.asked = 0.0, []
        monkeypatch.setattr("bench.serving.prefill.time.perf_counter", lambda: self.now)

    def ask(self, prompt):
        cached = max((self.shared(prompt, other) for other in self.asked), default=0)
        self.now += (len(prompt) - cached) / 1000
        self.asked.append(prompt)
        return cached

    @staticmethod
    def shared(prompt, other):
        length = 0
        while length + 16 < len(prompt) and prompt[length : length + 16] == other[length : length + 16]:
            length += 16
        return length


@pytest.mark.parametrize(
    ("kind", "asked", "cached", "seconds"),
    [("first_token", [512] * 4, 0, 0.512), ("prefix_hit", [384, 512] * 4, 384, 0.128)],
)
def test_the_first_prompt_of_a_context_does_not_count(monkeypatch, kind, asked, cached, seconds):
    engine, reads = FakeEngine(monkeypatch), [0.0, 0]

    def ask(prompt):
        # Shorter prompts, which fill the prefix cache, read everything; they must not count.
        reads[0] += 1.0 if len(prompt) == 512 else 10.0
        reads[1] += 10
        return engine.ask(prompt)

    monkeypatch.setattr(prefill, "count_totals", lambda: {"vllm_sparse_prefill_density": (reads[0], reads[1])})
    columns = prefill.measure(kind, 512, ask, prefill.fresh_prompts(4096), 3)
    assert [len(prompt) for prompt in engine.asked] == asked
    assert columns == {
        "cached_tokens": cached, "seconds": [seconds] * 3, "seconds_median": seconds, "prefill_density": 0.1,
    }  # fmt: skip
    assert len({prompt[0] for prompt in engine.asked}) == 4


@pytest.mark.parametrize(("kind", "cached"), [("first_token", 16), ("prefix_hit", 0), ("prefix_hit", 752)])
def test_a_prompt_that_the_cache_knows_otherwise_than_meant_is_no_result(kind, cached):
    with pytest.raises(RuntimeError, match=f"{cached} of a prompt's tokens came from the prefix cache, not about"):
        prefill.measure(kind, 1000, lambda _: cached, prefill.fresh_prompts(4096), 1)


def test_each_variant_gets_a_process_and_a_failure_is_named(monkeypatch, tmp_path, capsys):
    def run_python(module, arguments, seconds):
        settings = prefill.PrefillSettings.model_validate_json(arguments[1])
        assert (module, arguments[0], settings.contexts) == ("bench.serving", "prefill-variant", (32768, 8192))
        assert 0 < seconds <= 100
        if settings.variant == "flash_attn":
            with ResultFile(Path(settings.output)) as file:
                about = {"variant": "flash_attn", "measurement": "first_token", "context_tokens": 8192}
                file.write(about | {"seconds_median": 0.5})
        return {"flash_attn": 0, "unique": None, "quest": 3}[settings.variant]

    monkeypatch.setattr("bench.serving.variants.run_python", run_python)
    output = tmp_path / "out.jsonl"
    arguments = ["--variant", "flash_attn,unique,quest", "--grid", "32K,8K", "--time-limit", "100"]
    monkeypatch.setattr(sys, "argv", ["bench", "prefill", *arguments, "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        serving_main()
    assert ended.value.code == 3
    shown = capsys.readouterr().out
    assert "error: unique was not done by the deadline\nerror: quest ended with exit code 3" in shown
    assert "0.500" in shown
    assert len(read_run(output).rows) == 1
