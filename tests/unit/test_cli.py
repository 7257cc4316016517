import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_sparse_plugin import __version__
from vllm_sparse_plugin.config import SparseAttentionConfig, resolve
from vllm_sparse_plugin.errors import choices
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.tools import arguments
from vllm_sparse_plugin.tools.cli import app, main

NAMES = choices(name.lower() for name in BACKENDS)


@pytest.fixture(autouse=True)
def _own_signals():
    previous = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.fixture
def no_servers(monkeypatch):
    """If a refusal does not come in time, the test fails instead of starting a server."""

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
    code, out, err = run("show-config", "--attention-backend", backend)
    assert (code, err) == (0, "")
    out = out[: out.rindex("┘")]
    resolved = resolve(None, BACKENDS[backend.upper()])
    expected = {}
    for name, value in resolved.config.model_dump(by_alias=True).items():
        inner = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        for key, item in inner.items():
            shown = item if isinstance(item, str) else json.dumps(item)
            expected[key] = shown, resolved.sources.get(key, "default")
    assert rows(out) == expected
    assert len(SparseAttentionConfig.model_fields) <= len(expected)


def test_show_config_shows_where_each_value_came_from(run):
    settings = {"sparse_attention": {"preset": "unique_wide", "selection": {"lambda": 0.5, "statistics": "int8"}}}
    code, out, _ = run("show-config", "--additional-config", json.dumps(settings))
    assert code == 0
    shown = rows(out)
    assert shown["selection.lambda"] == ("0.5", "additional config")
    assert shown["selection.budget_tokens"] == ("2048", "preset unique_wide")
    assert shown["selection.sink_pages"] == ("1", "default")


ADDITIONAL = {
    "no JSON": ("{", "additional_config: got text that is not JSON ("),
    "key twice": ('{"a": {"b": 1, "b": 2}}', "additional_config: got a key twice in an object, allowed: each key once"),
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
    if text:  # an empty text equals no option
        assert refused(run("needles", "--additional-config", text)).startswith(sentence)


@pytest.mark.parametrize("backend", ["", "flash_attn", "uniq\nue"], ids=repr)
def test_show_config_refuses_an_unknown_backend(run, backend):
    message = refused(run("show-config", "--attention-backend", backend))
    assert message == f"attention_backend: got {backend!r}, allowed: {NAMES}"


@pytest.mark.parametrize("backend", ["", "flash_attn", "uniq\nue"], ids=repr)
@pytest.mark.usefixtures("no_servers")
def test_needles_refuses_an_unknown_backend(run, backend):
    assert (
        refused(run("needles", "--attention-backend", backend))
        == f"attention_backend: got {backend!r}, allowed: {NAMES}, each once"
    )


NEEDLES = {
    "context too long": (["--context", "32769"], "context: got 32769 tokens, allowed: from 4096 to the model's 32768"),
    "one context too long": (
        ["--context", "4096", "--context", "40000"],
        "context: got 40000 tokens, allowed: from 4096 to the model's 32768",
    ),
    "context too short": (["--context", "4095"], "context: got 4095 tokens, allowed: from 4096 to the model's 32768"),
    "a backend twice": (
        ["--attention-backend", "quest", "--attention-backend", "quest"],
        f"attention_backend: got 'quest', allowed: {NAMES}, each once",
    ),
    "two backends to keep": (
        ["--attention-backend", "quest", "--attention-backend", "unique", "--keep"],
        "attention_backend: got 2 of them, allowed with keep: one",
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
        f"model: got {str(tmp_path)!r}, allowed: a folder with a config.json that has max_position_embeddings, "
        "num_hidden_layers and head_dim"
    )


@pytest.mark.usefixtures("no_servers")
def test_needles_refuses_a_model_that_does_not_exist(run, tmp_path):
    missing = tmp_path / "missing"
    said = refused(run("needles", "--model", str(missing)))
    assert said == f"model: got {str(missing)!r}, which does not exist, allowed: the folder of a model"


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
        [command, "show-config", "--attention-backend", "nope"], capture_output=True, text=True, cwd="/", timeout=300
    )
    assert refused((done.returncode, done.stdout, done.stderr)) == (f"attention_backend: got 'nope', allowed: {NAMES}")


def imported_by(*arguments: str) -> set[str]:
    """Names of the packages that a command imports."""
    script = (
        "import json, sys\n"
        "from vllm_sparse_plugin.tools.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd="/", timeout=300
    )
    assert done.returncode == 0
    return set(json.loads(done.stderr.splitlines()[-1]))


HEAVY = {"torch", "vllm", "transformers", "triton", "numpy", "openai", "numba", "prometheus_client"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("show-config",),
        ("diagnose", "--help"),
        ("calibrate", "--help"),
        ("anchors", "--help"),
        ("eval", "--help"),
    ],
    ids=" ".join,
)
def test_what_needs_no_model_imports_nothing_heavy(arguments):
    imported = imported_by(*arguments)
    assert "typer" in imported
    assert not imported & HEAVY


def test_the_version_is_printed(run):
    assert run("--version") == (0, f"vllm-sparse {__version__}\n", "")


@pytest.mark.parametrize("name", app.COMMANDS)
def test_the_list_of_commands_says_what_their_documentation_does(run, name):
    command = app.COMMANDS[name]
    module = importlib.import_module(f"vllm_sparse_plugin.tools.cli.{command.module}")
    function = getattr(module, {"eval": "evaluate"}.get(name, command.name))
    assert inspect.getdoc(function).splitlines()[0] == command.help
    out = run("--help")[1]
    assert " ".join(command.help.split()[:4]) in out


def complete(words: str) -> list[str]:
    """The shell's completions for the last of these words."""
    command = Path(sys.executable).parent / "vllm-sparse"
    settings = {
        "_VLLM_SPARSE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run([command], capture_output=True, text=True, env=os.environ | settings, timeout=300)
    return done.stdout.split()


def test_a_shell_completes_commands_options_and_backends():
    assert complete("vllm-sparse show") == ["show-config"]
    assert complete("vllm-sparse show-config --attention-backend uni") == [
        "unique",
        "unique_prefill",
    ]
    assert complete("vllm-sparse diagnose --attention-b") == ["--attention-backend"]


@pytest.mark.parametrize("command", ["diagnose", "calibrate", "anchors"])
def test_a_model_must_be_named_where_there_is_no_checkout(run, monkeypatch, tmp_path, command):
    monkeypatch.setattr(arguments, "NEEDLE_MODEL", tmp_path / "missing")
    assert refused(run(command)) == "model: got none, allowed outside of a checkout: the folder of a model"


def test_show_config_prints_what_a_server_would_say_at_start(run):
    code, out, _ = run("show-config", "--additional-config", '{"sparse_attention": {"preset": "infllm"}}')
    assert code == 0
    assert out.splitlines()[-1].startswith("sparse_attention.selection.policy: Representative keys are those ")
    assert "16-bit" not in run("show-config")[1]
    assert (
        "sparse_attention.selection.statistics: 'auto' stores int8 means"
        in run("show-config", "--kv-cache-dtype", "fp8")[1]
    )


def test_show_config_shows_what_auto_stands_for(run):
    for backend, tokens in (("art", "512"), ("unique", "64")):
        settings = ["--additional-config", '{"sparse_attention": {"stopping": {}}}']
        out = run("show-config", "--attention-backend", backend, *settings)[1]
        assert rows(out)["stopping.block_tokens"] == (tokens, "default")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--kv-cache-dtype", "fp7"], "kv_cache_dtype: got 'fp7', allowed: auto, bfloat16, "),
        (
            ["--additional-config", '{"sparce_attention": {}}'],
            "additional_config: got the key 'sparce_attention' (did you",
        ),
        (
            ["--model", "org/name"],
            "model: got 'org/name', neither a folder nor in the cache, allowed: a folder, or this",
        ),
        (
            ["--model", "smollm2-135m"],
            "model: got 'smollm2-135m', neither a folder nor in the cache, allowed: a folder, or",
        ),
    ],
)
def test_show_config_refuses_what_a_server_refuses(run, monkeypatch, tmp_path, arguments, sentence):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = refused(run("show-config", *arguments))
    assert said.startswith(sentence)
    if arguments[0] == "--model":
        name = arguments[1]
        assert said.endswith(f"after `{'hf download' if '/' in name else 'vllm-sparse fetch-model'} {name}`")


def test_a_fetched_model_is_found_by_its_name(run, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "vllm-sparse" / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert run("show-config", "--model", "smollm2-135m")[0] == 0
