import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_sparse_plugin.cli import main
from vllm_sparse_plugin.config import SparseAttentionConfig, resolve
from vllm_sparse_plugin.registration import BACKENDS


@pytest.fixture(autouse=True)
def _own_signals():
    previous = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.fixture
def no_servers(monkeypatch):
    """A refusal that does not come in time fails here instead of starting a server."""

    def started(*_args, **_kwargs):
        raise AssertionError("a server was started")

    monkeypatch.setattr(subprocess, "Popen", started)


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vllm-sparse", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call


def rows(out: str) -> dict[str, tuple[str, str]]:
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    return {field: (value, source) for field, value, source in cells}


def refused(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    return err.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize("backend", [*BACKENDS, *(name.lower() for name in BACKENDS)])
def test_show_config_prints_every_field_with_its_value_and_source(run, backend):
    code, out, err = run("show-config", "--backend", backend)
    assert (code, err) == (0, "")
    resolved = resolve(None, BACKENDS[backend.upper()])
    expected = {}
    for name, value in resolved.config.model_dump(by_alias=True).items():
        inner = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        expected |= {key: (str(item), resolved.sources.get(key, "default")) for key, item in inner.items()}
    assert rows(out) == expected
    assert len(SparseAttentionConfig.model_fields) <= len(expected)


def test_show_config_shows_where_each_value_came_from(run):
    settings = {"sparse_attention": {"preset": "unique_wide", "selection": {"lambda": 0.5}}}
    code, out, _ = run("show-config", "--additional-config", json.dumps(settings))
    assert code == 0
    shown = rows(out)
    assert shown["selection.lambda"] == ("0.5", "additional config")
    assert shown["selection.budget_tokens"] == ("2048", "preset unique_wide")
    assert shown["selection.sink_pages"] == ("1", "default")


ADDITIONAL = {
    "no JSON": ("{", "additional_config: got text that is not JSON ("),
    "empty": ("", "additional_config: got text that is not JSON ("),
    "list": ("[1]", "additional_config: got '[1]', allowed: a JSON object"),
    "list over several lines": ("[\n1\n]", "additional_config: got '[\\n1\\n]', allowed: a JSON object"),
    "number": ("5", "additional_config: got '5', allowed: a JSON object"),
    "number too long": ("9" * 5000, "additional_config: got text that is not JSON ("),
    "settings that are no mapping": ('{"sparse_attention": 1}', "sparse_attention: got 1, allowed: a JSON object"),
    "unknown key": ('{"sparse_attention": {"topk": 1}}', "sparse_attention.topk: unknown key, allowed: selection, "),
    "value out of range": (
        '{"sparse_attention": {"selection": {"sink_pages": -1}}}',
        "sparse_attention.selection.sink_pages: got -1, allowed: an integer from 0 to 64",
    ),
}


@pytest.mark.parametrize("case", ADDITIONAL)
def test_show_config_refuses_additional_config(run, case):
    text, sentence = ADDITIONAL[case]
    assert refused(run("show-config", "--additional-config", text)).startswith(sentence)


@pytest.mark.parametrize("case", ADDITIONAL)
@pytest.mark.usefixtures("no_servers")
def test_needles_refuses_additional_config(run, case):
    text, sentence = ADDITIONAL[case]
    if text:  # an empty one is the same as none
        assert refused(run("needles", "--additional-config", text)).startswith(sentence)


@pytest.mark.parametrize("command", ["show-config", "needles"])
@pytest.mark.parametrize("backend", ["", "flash_attn", "uniq\nue"], ids=repr)
@pytest.mark.usefixtures("no_servers")
def test_unknown_backend_is_refused(run, command, backend):
    message = refused(run(command, "--backend", backend))
    allowed = "unique, quest, infllm, mean, streaming_llm, dense, sinkrouter or art" + (
        ", each once" if command == "needles" else ""
    )
    assert message == f"backend: got {backend!r}, allowed: {allowed}"


NEEDLES = {
    "context too long": (["--context", "32769"], "context: got 32769 tokens, allowed: at most the model's 32768"),
    "one context too long": (
        ["--context", "4096", "--context", "40000"],
        "context: got 40000 tokens, allowed: at most the model's 32768",
    ),
    "context too short": (["--context", "4095"], "context: got 4095 tokens, allowed: 4096 or more"),
    "a backend twice": (
        ["--backend", "quest", "--backend", "quest"],
        "backend: got 'quest', allowed: unique, quest, infllm, mean, streaming_llm, dense, sinkrouter or art, each "
        "once",
    ),
    "two backends to keep": (
        ["--backend", "quest", "--backend", "unique", "--keep"],
        "backend: got 2 of them, allowed with keep: one",
    ),
    "no questions": (["--questions", "0"], "questions: got 0, allowed: 1 or more"),
    "ratio too large": (["--min-ratio", "1.01"], "min_ratio: got 1.01, allowed: 0 to 1"),
    "ratio too small": (["--min-ratio", "-0.1"], "min_ratio: got -0.1, allowed: 0 to 1"),
    "ratio that is no number": (["--min-ratio", "nan"], "min_ratio: got nan, allowed: 0 to 1"),
}


@pytest.mark.parametrize("case", NEEDLES)
@pytest.mark.usefixtures("no_servers")
def test_needles_refuses(run, case):
    arguments, sentence = NEEDLES[case]
    assert refused(run("needles", *arguments)) == sentence


@pytest.mark.parametrize("content", [None, "{", "{}", "[]", '{"max_position_embeddings": 4096}'])
@pytest.mark.usefixtures("no_servers")
def test_needles_refuses_a_folder_without_a_usable_model(run, tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert refused(run("needles", "--model", str(tmp_path))) == (
        f"model: got {str(tmp_path)!r}, allowed: a folder with a config.json that has max_position_embeddings and "
        "head_dim"
    )


@pytest.mark.usefixtures("no_servers")
def test_needles_refuses_a_model_that_does_not_exist(run, tmp_path):
    missing = tmp_path / "missing"
    assert refused(run("needles", "--model", str(missing))).startswith(f"model: got {str(missing)!r}, allowed: ")


@pytest.mark.usefixtures("no_servers")
def test_needles_refuses_a_report_that_cannot_be_written(run, tmp_path):
    report = tmp_path / "missing" / "report.jsonl"
    arguments = ["--context", "4096", "--questions", "1", "--json", str(report)]
    assert refused(run("needles", *arguments)) == (
        f"json: got {str(report)!r} (No such file or directory), allowed: a file that can be written"
    )


def test_the_installed_command_prints_one_line_and_exits_with_2():
    command = Path(sys.executable).parent / "vllm-sparse"
    done = subprocess.run(
        [command, "show-config", "--backend", "nope"], capture_output=True, text=True, cwd="/", timeout=300
    )
    assert refused((done.returncode, done.stdout, done.stderr)) == (
        "backend: got 'nope', allowed: unique, quest, infllm, mean, streaming_llm, dense, sinkrouter or art"
    )
