import importlib
import inspect
import json
import subprocess
import sys

import pytest

from vllm_sparse_plugin import __version__
from vllm_sparse_plugin.config import SparseAttentionConfig, resolve
from vllm_sparse_plugin.errors import choices
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.tools import arguments
from vllm_sparse_plugin.tools.cli import app, main

NAMES = choices(name.lower() for name in BACKENDS)


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


@pytest.mark.parametrize("backend", ["", "flash_attn", "uniq\nue"], ids=repr)
def test_show_config_refuses_an_unknown_backend(run, backend):
    message = refused(run("show-config", "--attention-backend", backend))
    assert message == f"attention_backend: got {backend!r}, allowed: {NAMES}"


NEEDLES = {
    "context too long": (["--context", "32769"], "context: got 32769 tokens, allowed: from 4096 to the model's 32768"),
    "settings": (
        ["--additional-config", '{"sparse_attention": {"topk": 1}}'],
        "sparse_attention.topk: unknown key, allowed: ",
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
    "ratio that is no number": (["--min-ratio", "nan"], "min_ratio: got nan, allowed: 0 to 1"),
}


@pytest.mark.parametrize("case", NEEDLES)
@pytest.mark.usefixtures("no_servers")
def test_needles_refuses(run, case):
    arguments, sentence = NEEDLES[case]
    assert refused(run("needles", *arguments)).startswith(sentence)


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
