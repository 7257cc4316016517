"""Every command ends with one sentence for what it cannot read or write, for a signal, and without memory."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_sparse_plugin.tools import caches, endings, extras
from vllm_sparse_plugin.tools.cli import main, show_config
from vllm_sparse_plugin.tools.provenance import open_report, write_output

MODEL = Path(__file__).parents[2] / "models" / "needle-8m"
WHOLE = json.dumps({"prompt": "a b c", "completion": " d"}) + "\n"
LONG = "".join(json.dumps({"prompt": f"x = {i}\n" * 800, "completion": "y = 2\n" * 800}) + "\n" for i in (1, 2))
ANSWER = {
    "id": "kv/4096/0", "task": "kv", "context_tokens": 4096, "prompt_tokens": 1, "forced_tokens": 0, "digest": "0",
    "answers": ["a"], "completion": "a", "metric": "exact_first_line", "score": 1, "seconds": 1,
}  # fmt: skip
RESULTS = f"{json.dumps({'settings': {'label': 'x', 'decode_from': 'prompt'}})}\n{json.dumps(ANSWER)}\n"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
FILES = {"data.jsonl": WHOLE * 2, "long.jsonl": LONG, "good.jsonl": RESULTS}
EVAL = ["eval", "--in-process", "--model", str(MODEL)]
READING = {
    "diagnose": ["diagnose", "--prompts", "long.jsonl", "--json", "new"],
    "calibrate": ["calibrate", "--prompts", "long.jsonl", "--context", "64", "--context", "128", "--output", "new"],
    "anchors": ["anchors", "--prompts", "long.jsonl", "--context", "128", "--budget", "64", "--output", "new"],
    "train": ["train", "--data", "long.jsonl", "--output", "new", "--settings", '{"sequence_tokens": 2048}'],
    "eval": [*EVAL, "--completions", "data.jsonl", "--output", "new"],
}
"""Commands that read a model, up to its first forward pass."""


@pytest.fixture(autouse=True)
def _folder(monkeypatch, tmp_path):
    """Commands run in a temporary folder, and start nothing."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, content in FILES.items():
        Path(name).write_text(content)
    start = subprocess.Popen.__init__

    def only_questions(self, command, *arguments, **options):
        assert command[0] in ("git", "nvidia-smi"), f"{command} was started"
        start(self, command, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", only_questions)


@pytest.fixture
def run(monkeypatch, capfd):
    """Returns the sentence that a command ends with."""

    def call(*arguments: object, code: int = 2) -> str:
        monkeypatch.setattr(sys, "argv", ["vllm-sparse", *map(str, arguments)])
        handlers = [signal.getsignal(number) for number in endings._SIGNALS]
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            for number, handler in zip(endings._SIGNALS, handlers, strict=True):
                signal.signal(number, handler)
        err = capfd.readouterr().err
        assert (ended.value.code or 0, len(err.splitlines())) == (code, int(code != 0)), err
        return err.removeprefix("error: ").rstrip("\n")

    return call


def names() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


INPUTS = {
    "diagnose --prompts": (["diagnose"], "prompts"),
    "calibrate --prompts": (["calibrate"], "prompts"),
    "anchors --prompts": (["anchors"], "prompts"),
    "tune --prompts": (["tune", "--model", str(MODEL)], "prompts"),
    "train --data": (["train", "--output", "new"], "data"),
    "eval --completions": ([*EVAL, "--output", "new"], "completions"),
    "eval --text": ([*EVAL, "--output", "new"], "text"),
    "eval show": (["eval", "show"], ""),
    "eval compare": (["eval", "compare", "good.jsonl"], ""),
    "eval compare --again": (["eval", "compare", "good.jsonl", "good.jsonl"], "again"),
}
"""Commands that read a file, and the option that names it; empty for an argument."""


@pytest.mark.parametrize("bad", ["missing", "/dev/zero", "not UTF-8"])
@pytest.mark.parametrize("case", INPUTS)
def test_a_file_that_cannot_be_used(run, case, bad):
    command, option = INPUTS[case]
    if bad == "not UTF-8":
        Path(bad).write_bytes(WHOLE.encode("utf-16"))
    before = names()
    said = run(*command, *([f"--{option}"] if option else []), bad)
    assert said.startswith(f"{'results' if option in ('', 'again') else option}: got "), said
    assert ", allowed: " in said
    assert names() == before


BAD_MODELS: dict[str, bytes | None] = {
    "missing": None,
    "half-written": b'{"num_hidden_layers": 2, ',
    "not UTF-8": b'{"model_type": "\xff"}',
    "a list": b"[1]",
    "nested": b'{"a":' * 100_000,
    "numbers that are none": b'{"max_position_embeddings": 1e999, "num_hidden_layers": 0, "num_attention_heads": 0}',
}
"""Bad contents of a model's config.json."""


@pytest.mark.parametrize(
    ("command", "mistake"),
    [
        *(("plan", mistake) for mistake in BAD_MODELS),
        *((command, "nested") for command in ("show-config", "needles", "diagnose", "calibrate", "anchors", "train")),
        *((command, "numbers that are none") for command in ("needles", "diagnose", "calibrate", "anchors", "train")),
    ],
)
def test_a_model_whose_config_cannot_be_used(run, command, mistake):
    Path("model").mkdir()
    if BAD_MODELS[mistake] is not None:
        Path("model/config.json").write_bytes(BAD_MODELS[mistake])
    assert run(*READING.get(command, [command]), "--model", "model").startswith("model: got ")
    assert names() == sorted([*FILES, "model"])


@pytest.mark.parametrize("command", ["diagnose", "train"])
def test_weights_that_cannot_be_read(run, command):
    shutil.copytree(MODEL, "model")
    Path("model/model.safetensors").write_bytes(LFS)
    assert run(*READING[command], "--model", "model").startswith("model: got 'model' (")
    assert names() == sorted([*FILES, "model"])


@pytest.mark.parametrize("command", READING)
def test_a_tokenizer_that_cannot_be_read(run, command):
    shutil.copytree(MODEL, "model")
    Path("model/tokenizer.json").write_bytes(LFS)
    said = run(*READING[command], "--model", "model")
    assert said.startswith(("model: got ", "tokenizer: got "))
    assert said.endswith("a folder with a tokenizer")


def test_a_configuration_of_another_model_is_not_measured(run):
    """Weights missing in the file would be random."""
    shutil.copytree(MODEL, "model")
    config = json.loads((MODEL / "config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    said = run(*READING["diagnose"], "--model", "model")
    assert said.startswith("model: got 'model' without ")
    assert said.endswith("allowed: weights and a config.json of the same model")


OUTPUTS = {
    "needles": (["needles"], "json"),
    "real": (["real"], "json"),
    "diagnose": (READING["diagnose"][:3], "json"),
    "calibrate": (READING["calibrate"][:7], "json"),
    "calibrate's preset": (["calibrate"], "output"),
    "anchors": (READING["anchors"][:7], "json"),
    "anchors' preset": (["anchors"], "output"),
    "eval": (READING["eval"][:-2], "output"),
    "eval's picture": (READING["eval"], "plot"),
    "eval show": (["eval", "show", "good.jsonl"], "plot"),
    "tune": (["tune", "--model", str(MODEL), "--prompts", "data.jsonl"], "output"),
    "train": (["train", "--data", "long.jsonl", "--settings", '{"sequence_tokens": 2048}'], "output"),
    "fetch-model": (["fetch-model", "smollm2-135m"], "output"),
}


@pytest.mark.parametrize("place", ["missing/x.png", "folder.png"])
@pytest.mark.parametrize("case", OUTPUTS)
def test_an_output_that_cannot_be_written(run, monkeypatch, case, place):
    command, option = OUTPUTS[case]
    Path("folder.png").mkdir()
    if case in ("fetch-model", "tune", "train"):  # whose output is a folder
        place = "data.jsonl"
    # This is checked before anything is measured.
    monkeypatch.setattr(endings.Console, "print", lambda *_, **_options: pytest.fail("it began"))
    before = names()
    said = run(*command, f"--{option}", place)
    assert said.startswith(f"{option}: got {place!r} ("), said
    assert names() == before


def test_a_report_replaces_the_last_one_with_its_first_row_alone(tmp_path):
    path = tmp_path / "report.jsonl"
    path.write_text("an old one\n")
    with pytest.raises(KeyError), open_report(path, MODEL, "json"):
        raise KeyError
    assert path.read_text() == "an old one\n"
    with open_report(path, MODEL, "json") as report:
        for row in (1, 2):
            report.add({"row": row})
            first, *rows = map(json.loads, path.read_text().splitlines())
            assert (first["model"], rows[-1], len(rows)) == ("needle-8m", {"row": row}, row)


def test_rows_that_cannot_be_written_end_a_run_after_its_results(capsys):
    def write() -> None:
        with open_report(Path("/dev/full"), MODEL, "json") as report:
            report.add({})
            report.add({})
            print("results")

    with pytest.raises(
        endings.ConfigurationError, match=r"^json: got '/dev/full' \(No space left on device\), allowed"
    ):
        write()
    assert capsys.readouterr().out == "results\n"


@pytest.mark.parametrize("place", ["/dev/full", "closed pipe"])
@pytest.mark.parametrize("command", ["--help", "show-config", "plan"])
def test_stdout_that_cannot_be_written(monkeypatch, command, place):
    monkeypatch.undo()
    if place == "closed pipe":
        reader, stdout = os.pipe()
        os.close(reader)
    else:
        stdout = os.open(place, os.O_WRONLY)
    python = [sys.executable, "-m", "vllm_sparse_plugin"]
    done = subprocess.run([*python, *command.split()], text=True, stdout=stdout, stderr=subprocess.PIPE, cwd=MODEL)
    os.close(stdout)
    full = "error: stdout: got 'No space left on device', allowed: a place that can be written\n"
    assert done.stderr == ("" if place == "closed pipe" else full)


PACKAGES = {
    "eval": (["eval", "--output", "new"], extras.TABLES),
    "eval show": (["eval", "show", "x"], extras.TABLES),
    "eval compare": (["eval", "compare", "x", "y"], extras.TABLES),
    "tune": (["tune", "--model", "x", "--prompts", "x"], extras.TABLES),
    "train": (READING["train"], extras.TRAINING),
    "fetch-model": (["fetch-model", "smollm2-135m", "--output", "new"], extras.CONVERSION),
    "real": (["real"], (*extras.CONVERSION, *extras.STATISTICS)),
}


def pretend(monkeypatch, missing: str | None = None) -> None:
    """Packages of an extra are there, but for one."""
    find = importlib.util.find_spec

    def found(name: str, *rest: object) -> object:
        installed = name in extras.CONVERSION and SimpleNamespace()
        return None if name == missing else find(name, *rest) or installed or None

    monkeypatch.setattr(importlib.util, "find_spec", found)


@pytest.mark.parametrize(("case", "package"), [(case, name) for case in PACKAGES for name in PACKAGES[case][1]])
def test_a_package_that_is_missing(run, monkeypatch, case, package):
    pretend(monkeypatch, package)
    command = PACKAGES[case][0]
    begin, _, line = run(*command).partition("extra, ")
    assert begin == f"vllm-sparse {command[0]}: got no {package}, allowed: with the packages of its "
    # The package name `vllm` would install the CUDA build into an environment with the CPU build.
    assert line.startswith(f"pip install '{package}>")


STARTS = {
    "show-config": (["show-config"], "tools.cli.show_config.notices_of"),
    "needles": (["needles", "--json", "new"], "tools.cli.needle_test._ask_all"),
    "calibrate": (READING["calibrate"], "tools.diagnostics.forward.CapturingModel"),
    "tune": (
        ["tune", "--model", str(MODEL), "--prompts", "data.jsonl", "--output", "new"], "tools.cli.tune._run",
    ),
    "real": (["real", "--json", "new"], "tools.fetching._obtain"),
    "train": (READING["train"], "tools.training.trainer.Trainer"),
}  # fmt: skip
"""Arguments with which a command starts its work, and the function that it calls."""


@pytest.mark.parametrize("number", endings._SIGNALS)
@pytest.mark.parametrize("command", STARTS)
def test_a_signal_ends_the_command_in_one_sentence(run, monkeypatch, command, number):
    arguments, place = STARTS[command]
    pretend(monkeypatch)
    monkeypatch.setattr(f"vllm_sparse_plugin.{place}", lambda *_, **__: signal.raise_signal(number))
    assert run(*arguments, code=128 + number) == f"{endings._SIGNALS[number]}: stopping"
    # A run without a result leaves no file. The folder of `tune` stays.
    assert names() == sorted([*FILES, *(["new"] if command == "tune" else [])])


def test_a_signal_in_the_middle_of_a_file_keeps_the_last_one(run, monkeypatch):
    path = Path("good.jsonl")

    def write_half(self: Path, *_: object, **__: object) -> None:
        self.write_bytes(b"half")
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Path, "write_text", write_half)
    monkeypatch.setattr(show_config, "notices_of", lambda *_: write_output(path, "a new one", "output"))
    run("show-config", code=128 + signal.SIGTERM)
    assert (names(), path.read_text()) == (sorted(FILES), RESULTS)


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vllm-sparse", "show-config"])
    monkeypatch.setattr(show_config, "notices_of", lambda *_: (_ for _ in ()).throw(RuntimeError("ours")))
    with pytest.raises(RuntimeError, match="ours"):
        main()


OUT_OF_MEMORY = [
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory."),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_memory_that_runs_out_is_no_traceback(run, monkeypatch, error):
    monkeypatch.setattr(show_config, "notices_of", lambda *_: (_ for _ in ()).throw(error))
    assert run("show-config", code=3).startswith("memory ran out: ")


def test_compiled_kernels_have_a_folder_where_the_home_cannot_be_written(monkeypatch, tmp_path):
    kernels = SimpleNamespace(submodule_search_locations=[str(tmp_path / "package")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: kernels)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/.cache")
    removed = []
    monkeypatch.setattr(caches.atexit, "register", lambda *call, **_: removed.append(call[1]))
    caches.ensure_caches()  # the package can be written
    assert "NUMBA_CACHE_DIR" not in os.environ
    kernels.submodule_search_locations = ["/dev/null/package"]
    caches.ensure_caches()
    assert Path(os.environ["NUMBA_CACHE_DIR"]).is_dir()
    assert removed == [os.environ["NUMBA_CACHE_DIR"]]
    shutil.rmtree(removed[0])
