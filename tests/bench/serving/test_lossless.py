"""Measured lossless mode."""

import json
import sys
from types import SimpleNamespace

import pytest

from bench.serving.__main__ import main as serving_main
from bench.serving.lossless import measure_requests
from bench.serving.lossless import table as lossless_table


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
    monkeypatch.setattr("bench.serving.lossless.measure_variants", lambda _, settings, *__: found.extend(settings))
    config = json.dumps({"sparse_attention": {"selection": {"budget_tokens": 2048}, "lossless": {"score_every": 4}}})
    arguments = ["--draft-tokens", "4,12", "--adaptive", "--additional-config", config]
    arguments += ["--new-tokens", "6", "--repeats", "2", "--output", str(tmp_path / "lossless.jsonl")]
    monkeypatch.setattr(sys, "argv", ["bench", "lossless", *arguments])
    with pytest.raises(SystemExit) as ended:
        serving_main()
    assert not ended.value.code
    assert [each.label for each in found] == ["flash_attn", "lossless, up to 4 drafts", "lossless, up to 12 drafts"]
    assert len({each.room for each in found}) == 1
    assert found[0].additional_config is None
    assert json.loads(found[1].additional_config)["sparse_attention"] == {
        "selection": {"budget_tokens": 2048},
        "lossless": {"score_every": 4, "draft_tokens": 4, "draft_length": "adaptive"},
    }
    # Time is divided by the tokens that came out of whole steps.
    engine, settings = SteppingEngine(), found[1].model_copy(update={"adaptive": False})
    times = measure_requests(engine, [[1], [2]], settings)
    assert times["tokens_per_step"] == 2.5
    assert times["ms_per_step"] / times["ms_per_token"] == pytest.approx(2.5, rel=0.3)
    assert len(engine.aborted) == 2
    with pytest.raises(RuntimeError, match="a request ended after"):
        measure_requests(SteppingEngine(), [[1]], settings.model_copy(update={"repeats": 500}))


def test_lossless_mode_is_compared_with_dense_decoding_of_the_same_batch():
    about = {"load": "8x32K", "tokens_per_step": 4.0, "ms_per_step": 20.0, "draft_length": "fixed"}
    lines = lossless_table(
        [
            about | {"draft_tokens": None, "acceptance": None, "ms_per_token": 10.0},
            about | {"draft_tokens": 8, "acceptance": 0.9, "ms_per_token": 4.0},
            about | {"draft_tokens": 8, "acceptance": None, "ms_per_token": 5.0, "draft_length": "adaptive"},
            about | {"draft_tokens": 8, "acceptance": 0.95, "skipped": "no room"},
        ]
    )
    cells = [list(column.cells) for column in lines.columns]
    assert cells[1:3] == [["-", "8", "up to 8", "8"], ["-", "0.9", "model", "0.95"]]
    assert cells[-1] == ["-", "2.50", "2.00", "-"]
