"""Measured compaction and lossless mode."""

import json
import sys
from types import SimpleNamespace

import pytest

from bench.common.options import parse_grid
from bench.serving.__main__ import main as serving_main
from bench.serving.compaction import Timed
from bench.serving.compaction import columns as compaction_columns
from bench.serving.lossless import LosslessSettings, measure_requests
from bench.serving.lossless import table as lossless_table


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
        "most_draft_tokens": 3,
        "draft_length": "fixed",
        "min_context_tokens": 0,
        "score_every": 1,
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


@pytest.mark.parametrize("options", [(), ("--adaptive",)])
def test_dense_decoding_gets_the_prompts_of_lossless_mode(monkeypatch, tmp_path, options):
    found = []
    monkeypatch.setattr("bench.serving.lossless.measure_variants", lambda _, settings, *__: found.extend(settings))
    arguments = ["--draft-tokens", "4,12", *options, "--output", str(tmp_path / "lossless.jsonl")]
    monkeypatch.setattr(sys, "argv", ["bench", "lossless", *arguments])
    with pytest.raises(SystemExit) as ended:
        serving_main()
    assert not ended.value.code
    assert [settings.draft_tokens for settings in found] == [None, 4, 12]
    assert len({settings.room for settings in found}) == 1


def test_lossless_mode_is_compared_with_dense_decoding_of_the_same_batch():
    about = {"context_tokens": 32768, "batch": 8}
    times = {"tokens_per_step": 4.0, "ms_per_step": 20.0}
    lines = lossless_table(
        [
            about | times | {"draft_tokens": None, "acceptance": None, "ms_per_token": 10.0},
            about | times | {"draft_tokens": 8, "acceptance": 0.9, "score_every": 4, "ms_per_token": 4.0},
            about | times | {"draft_tokens": 8, "acceptance": None, "ms_per_token": 5.0, "draft_length": "adaptive"},
            about | {"draft_tokens": 8, "acceptance": 0.95, "skipped": "no room"},
        ]
    )
    cells = [list(column.cells) for column in lines.columns]
    assert cells[-1] == ["-", "2.50", "2.00", "-"]
    assert cells[2] == ["-", "8", "up to 8", "8"]
    assert cells[3] == ["-", "0.9", "model", "0.95"]
    assert cells[4] == ["-", "4", "1", "1"]
    assert lossless_settings(score_every=4).variant == "lossless, 3 drafts, scored every 4"
    assert '"score_every": 4' in lossless_settings(score_every=4).additional_config
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
