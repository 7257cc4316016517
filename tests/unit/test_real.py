"""The command `vllm-sparse real` with a small model and endpoints that answer from a table."""

import json
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_sparse_plugin.tools.cli import main, real
from vllm_sparse_plugin.tools.eval import endpoints
from vllm_sparse_plugin.tools.eval.endpoints import Reply

MODEL = Path(__file__).parents[2] / "models" / "needle-8m"
SAME, OTHER = {1: -0.1, 2: -3.0}, {1: -3.0, 2: -0.1}


class Endpoint:
    """Expects another token at `changed` of its first 10 positions."""

    def __init__(self, backend: str | None, concurrency: int) -> None:
        self._changed = {(None, 1): 0, (None, real._BATCH): 1, ("unique", 1): 4, ("dense", 1): 2}[backend, concurrency]

    def complete(self, requests):
        for request in requests:
            if request.answer_tokens:
                yield Reply([], [], 1.0)
            else:
                positions = range(len(request.forced))
                yield Reply(
                    [], [-1.0] * len(positions), 1.0, tuple(OTHER if p < self._changed else SAME for p in positions)
                )


@pytest.fixture
def run(monkeypatch, capsys):
    started = []

    @contextmanager
    def run_server(name, settings, _console):
        started.append((name, settings.backend, settings.additional_config))
        assert "--logprobs-mode" in settings.arguments
        yield settings.backend

    monkeypatch.setattr(real, "fetched_model", lambda *_: (MODEL, None))
    monkeypatch.setattr("vllm_sparse_plugin.tools.server.run_server", run_server)
    monkeypatch.setattr(endpoints, "Server", lambda client, _model, concurrency: Endpoint(client, concurrency))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, list[str], str, list]:
        monkeypatch.setattr(sys, "argv", ["vllm-sparse", "real", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
        return ended.value.code or 0, rows, err, started

    return call


def test_both_are_asked_and_dense_is_compared_with_itself(run, tmp_path):
    report = tmp_path / "report.jsonl"
    code, rows, _, started = run("--texts", "3", "--json", str(report))
    assert code == 0
    assert started == [("dense", None, None), ("unique", "unique", "{}")]
    assert [[cell.partition(" [")[0] for cell in row] for row in rows] == [
        *([f"{task}, score, asked 1", "0.00", "0.00"] for task in real._TASKS),
        ["same next token as dense, 3 texts x 64 tokens", f"{63 / 64:.1%}", f"{60 / 64:.1%}"],
        ["changed beyond the noise of dense attention", "", f"{3 / 64:.1%}"],
    ]
    assert all(re.search(r" \[-?[\d.]+%, [\d.]+%\]$", row[2]) for row in rows[3:])
    about, *answers = map(json.loads, report.read_text().splitlines())
    assert about["model"] == "smollm2-135m"
    assert [answer["run"] for answer in answers] == [
        *["dense"] * 3, *["dense, another batch"] * 3, *["dense"] * 3, *["unique"] * 6,
    ]  # fmt: skip


def test_our_backend_without_selection_is_not_taken_for_the_reference(run):
    """Its answers took the place of those of vLLM's attention, and were compared with themselves."""
    code, rows, _, started = run("--attention-backend", "dense")
    assert code == 0
    assert [backend for _, backend, _ in started] == [None, "dense"]
    assert rows[3][1].startswith(f"{63 / 64:.1%} [")
    assert rows[3][2].startswith(f"{62 / 64:.1%} [")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "x"], "model: got 'x', which does not exist, allowed: the folder of a model"),
        (["--attention-backend", "x"], "attention_backend: got 'x', allowed: "),
        (["--additional-config", "{"], "additional_config: got text that is not JSON "),
    ],
)
def test_bad_input_is_refused_before_a_server_starts(run, arguments, sentence):
    code, _, said, started = run(*arguments)
    assert code == 2
    assert said.startswith(f"error: {sentence}")
    assert not started
