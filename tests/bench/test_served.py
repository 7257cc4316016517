"""`bench.quality served`: its settings, its rows and what it says of a failed engine."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.quality import served
from bench.quality.__main__ import app
from vllm_sparse_plugin.errors import ConfigurationError

RIGHT, WRONG = {1: -0.1, 2: -3.0}, {1: -3.0, 2: -0.1}


def _eval_file(path: Path, label: str, changed: int) -> None:
    """A file of `vllm-sparse eval` with two texts of four tokens, `changed` of which differ in each."""
    lines = [{"settings": {"label": label}}]
    for number in (1, 2):
        predictions = [WRONG if place < changed else RIGHT for place in range(4)]
        lines.append(
            {
                "id": f"completion/line {number}", "task": "completion", "context_tokens": 12, "prompt_tokens": 12,
                "forced_tokens": 4, "digest": "", "answers": [], "completion": "", "metric": "nll",
                "score": 1.0 + changed, "seconds": 0.1, "predictions": predictions, "kv_read_share": 0.5,
            }
        )  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt": "a", "kind": "prose"}\n{"prompt": "b"}\n')
    return path


def _run(monkeypatch: pytest.MonkeyPatch, texts: Path, changed: dict[str, int]) -> tuple[int, str, Path]:
    def run_python(module: str, arguments: list[str], seconds: float, log: Path) -> int:
        output = Path(arguments[arguments.index("--output") + 1])
        name = output.stem
        log.write_text("the reason\n")
        if name not in changed:
            return 1
        _eval_file(output, name, changed[name])
        return 0

    monkeypatch.setattr(served, "run_python", run_python)
    output = texts.with_name("served.jsonl")
    command = [
        "served", "--model", str(texts.parent), "--texts", str(texts), "--setting", "unique:512,art",
        "--output", str(output),
    ]  # fmt: skip
    result = CliRunner().invoke(app, command)
    return result.exit_code, result.output, output


def test_rows_compare_every_text_with_dense_attention(monkeypatch: pytest.MonkeyPatch, texts: Path) -> None:
    code, shown, output = _run(monkeypatch, texts, {"dense": 0, "dense-again": 1, "unique-512": 2, "art": 0})
    assert code == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()][1:]
    found = {(row["setting"], row["text"]): row["agreement"] for row in rows}
    kinds = ("prose", "text")
    assert found == {
        (setting, kind): share
        for setting, share in {"dense-again": 0.75, "unique-512": 0.5, "art": 1.0}.items()
        for kind in kinds
    }
    assert {row["nll"] for row in rows if row["setting"] == "unique-512"} == {2.0}
    assert "25.0%" in shown  # what unique changes beyond dense attention in other batches


def test_a_failed_engine_is_named_and_the_others_are_kept(monkeypatch: pytest.MonkeyPatch, texts: Path) -> None:
    code, shown, output = _run(monkeypatch, texts, {"dense": 0, "dense-again": 0, "art": 1})
    assert code == 3
    assert "unique-512 ended with exit code 1: the reason" in shown
    assert {json.loads(line)["setting"] for line in output.read_text().splitlines()[1:]} == {"dense-again", "art"}


@pytest.mark.parametrize("text", ["art:512", "unique:few", "nothing", "unique:-1"])
def test_settings_without_that_budget_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        served.Setting.parse(text)
