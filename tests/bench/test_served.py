"""`bench.quality served` and `ruler`: settings, rows and the sentence for a failed engine."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.quality import settings
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
        name = ("dense", "dense-again", "unique-512", "art")[int(output.stem)]
        log.write_text("the reason\n")
        if name not in changed:
            return 1
        _eval_file(output, name, changed[name])
        return 0

    monkeypatch.setattr(settings, "run_python", run_python)
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


def test_ruler_writes_the_score_of_every_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def run_python(module: str, arguments: list[str], seconds: float, log: Path) -> int:
        asked.append(arguments)
        output = Path(arguments[arguments.index("--output") + 1])
        answer = {
            "id": "vt/4096/0", "task": "vt", "context_tokens": 4096, "prompt_tokens": 4099, "forced_tokens": 0,
            "digest": "", "answers": [], "completion": "", "metric": "all", "seconds": 0.1, "key_kept_share": 0.25,
            "score": 0.5 if output.stem == "0" else 0.2,
        }  # fmt: skip
        output.write_text("".join(json.dumps(line) + "\n" for line in ({"settings": {"label": ""}}, answer)))
        return 0

    monkeypatch.setattr(settings, "run_python", run_python)
    output = tmp_path / "ruler.jsonl"
    command = ["ruler", "--model", str(tmp_path), "--setting", "snapkv", "--context", "4K,8K", "--chat", "--task", "vt"]
    result = CliRunner().invoke(app, [*command, "--decode-from", "prompt", "--output", str(output)])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in output.read_text().splitlines()][1:]
    assert [(row["setting"], row["score"], row["key_kept_share"]) for row in rows] == [
        ("dense", 0.5, 0.25),
        ("snapkv", 0.2, 0.25),
    ]
    assert rows[0]["decode_from"] == "prompt"
    assert rows[0]["chat"]
    assert asked[1][asked[1].index("--attention-backend") + 1] == "snapkv"
    assert [asked[0][place + 1] for place, option in enumerate(asked[0]) if option == "--context"] == ["4096", "8192"]
    assert [asked[0][place + 1] for place, option in enumerate(asked[0]) if option == "--task"] == ["vt"]
    assert "--chat" in asked[0]


def test_a_setting_may_name_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    config.write_text("selection:\n  budget_tokens: 512\n")
    asked = []

    def run_python(module: str, arguments: list[str], seconds: float, log: Path) -> int:
        log.write_text("the reason\n")
        asked.append(arguments)
        return 1

    monkeypatch.setattr(settings, "run_python", run_python)
    setting = settings.Setting.parse(f"unique+config={config}")
    assert settings.evaluate([setting], [], 1, float("inf")) == (
        {},
        [f"{setting.name} ended with exit code 1: the reason"],
    )
    assert json.dumps({"sparse_attention": {"config": str(config)}}) in asked[0]


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("art", None),
        ("unique:512", {"selection": {"policy": "unique", "budget_tokens": 512}}),
        (
            "snapkv:2048+stopping.dense_order=votes+stopping.scale_tolerance=1e-3+min_context_tokens=0",
            {
                "compaction": {"method": "snapkv", "budget_tokens": 2048},
                "stopping": {"dense_order": "votes", "scale_tolerance": 0.001},
                "min_context_tokens": 0,
            },
        ),
        ("snapkv+preset=art", {"preset": "art"}),
    ],
)
def test_settings_are_those_of_additional_config(text: str, section: dict[str, object] | None) -> None:
    setting = settings.Setting.parse(text)
    name, backend, *more = setting.options
    assert (name, backend) == ("--attention-backend", text.partition("+")[0].partition(":")[0])
    assert more == ([] if section is None else ["--additional-config", json.dumps({"sparse_attention": section})])
    assert setting.name == text.replace(":", "-")


@pytest.mark.parametrize(
    "text",
    [
        "art:512", "unique:few", "nothing", "unique:-1", "art+", "art+stopping.patience", "art+stopping.nothing=1",
        "art+stopping.patience=few", "art+stopping=1+stopping.patience=1",
        "art+stopping.patience=1+stopping.patience=2", "snapkv:2048+compaction.budget_tokens=512",
    ],
)  # fmt: skip
def test_other_settings_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        settings.Setting.parse(text)
