"""Every command ends every mistake in one sentence on stderr, with the documented exit code, and loses nothing."""

import importlib
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

from vllm_sparse_plugin.tools import endings, extras
from vllm_sparse_plugin.tools.cli import main

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "needle-8m"
WHOLE = json.dumps({"prompt": "a b c", "completion": " d"}) + "\n"
HALF = WHOLE[:20]

INPUTS: dict[str, tuple[list[str], str]] = {
    "diagnose --prompts": (["diagnose"], "prompts"),
    "calibrate --prompts": (["calibrate"], "prompts"),
    "anchors --prompts": (["anchors"], "prompts"),
    "tune --prompts": (["tune", "--model", str(MODEL)], "prompts"),
    "train --data": (["train", "--output", "new"], "data"),
    "eval --completions": (["eval", "--in-process", "--model", str(MODEL), "--output", "new"], "completions"),
    "eval --text": (["eval", "--in-process", "--model", str(MODEL), "--output", "new"], "text"),
    "eval --file": (["eval", "--in-process", "--model", str(MODEL), "--output", "new", "--context", "4096"], "file"),
    "eval --squad": (
        ["eval", "--in-process", "--model", str(MODEL), "--output", "new", "--task", "qa_1", "--questions", "1"],
        "squad",
    ),
    "eval --hotpotqa": (
        ["eval", "--in-process", "--model", str(MODEL), "--output", "new", "--task", "qa_2", "--questions", "1"],
        "hotpotqa",
    ),
    "eval --prompts": (
        ["eval", "--in-process", "--model", str(MODEL), "--output", "new", "--context", "4096", "--file", "good.jsonl"],
        "prompts",
    ),
    "eval show": (["eval", "show"], ""),
    "eval compare": (["eval", "compare", "good.jsonl"], ""),
}
"""Commands that read a file, and the option that names it; empty for an argument."""
RESULTS = (json.dumps({"settings": {"label": "x", "decode_from": "prompt"}}) + "\n").encode()
"""A file of `eval` without an answer."""
CONTENTS: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "half-written": HALF.encode(),
    "not UTF-8": WHOLE.encode("utf-16"),
    "a byte that is not UTF-8": WHOLE.encode() + b'{"prompt": "\xff"}\n',
    "a lone surrogate": b'{"prompt": "a \\ud800 b", "data": ["\\udfff"], "{context} \\ud800": 1}\n',
    "nested": b"[" * 100_000,
}
BAD_MODELS: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "half-written": b'{"num_hidden_layers": 2, ',
    "not UTF-8": b'{"model_type": "\xff"}',
    "a list": b"[1]",
    "nested": b'{"a":' * 100_000,
    "numbers that are none": b'{"max_position_embeddings": 1e999, "num_hidden_layers": 0, "num_attention_heads": 0}',
}
"""Bad contents of a model's config.json."""


@pytest.fixture(autouse=True)
def _folder(monkeypatch, tmp_path):
    """Commands run in a temporary folder, and start nothing."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    start = subprocess.Popen.__init__

    def only_questions(self, command, *arguments, **options):
        assert command[0] in ("git", "nvidia-smi"), f"{command} was started"
        start(self, command, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", only_questions)


@pytest.fixture
def run(monkeypatch, capfd):
    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["vllm-sparse", *map(str, arguments)])
        handlers = [signal.getsignal(number) for number in endings._SIGNALS]
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            for number, handler in zip(endings._SIGNALS, handlers, strict=True):
                signal.signal(number, handler)
        return ended.value.code or 0, capfd.readouterr().err

    return call


def pretend(monkeypatch, installed: dict[str, str], missing: str | None = None) -> None:
    """Packages of an extra are there, but for one."""
    find = importlib.util.find_spec

    def found(name: str, *rest: object) -> object:
        return None if name == missing else find(name, *rest) or (name in installed and SimpleNamespace()) or None

    monkeypatch.setattr(importlib.util, "find_spec", found)


def sentence_of(result: tuple[int, str], code: int = 2) -> str:
    """The only line of stderr."""
    assert "Traceback" not in result[1]
    assert (result[0], len(result[1].splitlines())) == (code, 1), result
    return result[1].removeprefix("error: ").rstrip("\n")


def put(name: str, content: bytes | None) -> Path:
    path = Path(name)
    if content is not None:
        path.write_bytes(content)
    return path


ANY_TEXT_WILL_DO = [("eval --text", mistake) for mistake in ("half-written", "a lone surrogate", "nested")]


@pytest.mark.parametrize(
    ("case", "mistake"),
    [
        (case, mistake)
        for case in INPUTS
        for mistake in (*CONTENTS, "a folder", "endless")
        if (case, mistake) not in ANY_TEXT_WILL_DO
    ],
)
def test_a_file_that_cannot_be_used(run, case, mistake):
    command, option = INPUTS[case]
    put("good.jsonl", RESULTS)
    if "--file" in command:
        record = {"dataset": "trec", "context": "x", "input": "y", "answers": ["z"], "all_classes": ["z"]}
        Path("good.jsonl").write_text(json.dumps(record) + "\n")
    bad = Path("/dev/zero") if mistake == "endless" else put("bad", CONTENTS.get(mistake))
    if mistake == "a folder":
        bad.mkdir()
    before = sorted(path.name for path in Path().iterdir())
    named = [f"--{option}", str(bad)] if option else [str(bad)]
    said = sentence_of(run(*command, *named))
    assert said.startswith(f"{option or 'results'}: got "), said
    assert ", allowed: " in said
    assert sorted(path.name for path in Path().iterdir()) == before


@pytest.mark.parametrize(
    ("command", "mistake"),
    [
        (command, mistake)
        for command in ("show-config", "plan", "needles", "diagnose", "calibrate", "anchors", "train")
        for mistake in BAD_MODELS
        if (command, mistake) != ("show-config", "numbers that are none")  # it looks at no number
    ],
)
def test_a_model_whose_config_cannot_be_used(run, command, mistake):
    Path("model").mkdir()
    put("model/config.json", BAD_MODELS[mistake])
    data = put("data.jsonl", WHOLE.encode())
    more = ["--data", data, "--output", "new"] if command == "train" else []
    assert sentence_of(run(command, "--model", "model", *more)).startswith("model: got ")
    assert sorted(path.name for path in Path().iterdir()) == ["data.jsonl", "model"]


def damaged_model(part: str, content: bytes) -> Path:
    """A copy of needle-8m with one file replaced."""
    folder = Path("model")
    shutil.copytree(MODEL, folder)
    (folder / part).write_bytes(content)
    return folder


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
WEIGHTS = {"empty": b"", "a pointer of Git LFS": LFS, "truncated": (MODEL / "model.safetensors").read_bytes()[:5000]}


@pytest.mark.parametrize("mistake", WEIGHTS)
@pytest.mark.parametrize("command", ["diagnose", "calibrate", "anchors", "train"])
def test_weights_that_cannot_be_read(run, command, mistake):
    model = damaged_model("model.safetensors", WEIGHTS[mistake])
    text = "x = 1\n" * 2000
    data = put(
        "data.jsonl", "".join(json.dumps({"prompt": text, "completion": text}) + "\n" for _ in range(2)).encode()
    )
    arguments = {
        "diagnose": ["--prompts", data, "--json", "new"],
        "calibrate": ["--prompts", data, "--context", "1024", "--context", "2048", "--output", "new"],
        "anchors": ["--prompts", data, "--context", "2100", "--output", "new"],
        "train": ["--data", data, "--output", "new"],
    }[command]
    said = sentence_of(run(command, "--model", model, *arguments))
    assert said.startswith("model: got 'model' (")
    assert sorted(path.name for path in Path().iterdir()) == ["data.jsonl", "model"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"model": 1}', LFS], ids=["empty", "half", "other", "pointer"])
@pytest.mark.parametrize("command", ["diagnose", "calibrate", "anchors", "train", "eval"])
def test_a_tokenizer_that_cannot_be_read(run, command, content):
    model = damaged_model("tokenizer.json", content)
    data = put("data.jsonl", WHOLE.encode() * 2)
    arguments = {
        "diagnose": ["--prompts", data],
        "calibrate": ["--prompts", data],
        "anchors": ["--prompts", data],
        "train": ["--data", data, "--output", "new"],
        "eval": ["--completions", data, "--output", "new", "--in-process"],
    }[command]
    said = sentence_of(run(command, "--model", model, *arguments))
    assert said.startswith(("model: got ", "tokenizer: got "))
    assert said.endswith(("a folder with a tokenizer", "a name in Hugging Face's cache"))


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "banana", "", "meta"])
@pytest.mark.parametrize("command", ["diagnose", "calibrate", "anchors", "train"])
def test_a_device_that_is_not_there(run, command, device):
    more = ["--data", put("data.jsonl", WHOLE.encode()), "--output", "new"] if command == "train" else []
    said = sentence_of(run(command, "--device", device, *more))
    assert said == f"device: got {device!r}, allowed with this torch on this machine: cpu"


OUTPUTS = {
    "needles": (["needles"], "json"),
    "real": (["real"], "json"),
    "diagnose": (["diagnose", "--prompts", "data.jsonl"], "json"),
    "calibrate": (["calibrate", "--prompts", "long.jsonl", "--context", "64", "--context", "128"], "json"),
    "calibrate's preset": (["calibrate"], "output"),
    "anchors": (["anchors", "--prompts", "long.jsonl", "--context", "128", "--budget", "64"], "json"),
    "anchors' preset": (["anchors"], "output"),
    "eval": (["eval", "--completions", "data.jsonl", "--in-process", "--model", str(MODEL)], "output"),
    "eval's picture": (
        ["eval", "--completions", "data.jsonl", "--in-process", "--model", str(MODEL), "--output", "new"],
        "plot",
    ),
    "eval show": (["eval", "show", "results.jsonl"], "plot"),
    "tune": (["tune", "--model", str(MODEL), "--prompts", "data.jsonl"], "output"),
    "train": (["train", "--data", "long.jsonl", "--settings", '{"sequence_tokens": 2048}'], "output"),
    "fetch-model": (["fetch-model", "smollm2-135m"], "output"),
}


FOLDERS = ("fetch-model", "tune", "train")
"""Those whose output is a folder."""


@pytest.mark.parametrize(
    ("case", "place"),
    [(case, place) for case in FOLDERS for place in ("/dev/full", "a file")]
    + [(case, place) for case in OUTPUTS if case not in FOLDERS for place in ("/dev/full", "missing/file", "a folder")],
)
def test_an_output_that_cannot_be_written(run, monkeypatch, case, place):
    command, option = OUTPUTS[case]
    put("data.jsonl", WHOLE.encode())
    put("long.jsonl", (json.dumps({"prompt": "x = 1\n" * 800, "completion": "y = 2\n" * 800}) + "\n").encode() * 2)
    put("results.jsonl", RESULTS)
    if place == "a folder":
        Path("there.png").mkdir()
    elif place == "a file":
        Path("there.png").touch()
    elif place == "/dev/full":
        Path("full.png").symlink_to(place)  # pictures are named so
    place = {"/dev/full": "full.png", "missing/file": "missing/file.png"}.get(place, "there.png")
    # This is checked before anything is measured.
    monkeypatch.setattr(endings, "open_console", lambda: pytest.fail("it began"))
    before = sorted(path.name for path in Path().iterdir())
    said = sentence_of(run(*command, f"--{option}", place))
    assert said.startswith(f"{option}: got {place!r} ("), said
    assert sorted(path.name for path in Path().iterdir()) == before


def test_a_report_replaces_the_last_one_with_its_first_row_alone(tmp_path):
    from vllm_sparse_plugin.tools.provenance import open_report

    path = tmp_path / "report.jsonl"
    with pytest.raises(KeyError), open_report(path, MODEL, "json"):
        raise KeyError
    assert not path.exists()
    path.write_text("an old one\n")
    with pytest.raises(KeyError), open_report(path, MODEL, "json"):
        raise KeyError
    assert path.read_text() == "an old one\n"
    with open_report(path, MODEL, "json") as report:
        report.add({"row": 1})
        assert [*map(len, map(json.loads, path.read_text().splitlines()))][1] == 1
    first, row = map(json.loads, path.read_text().splitlines())
    assert (first["model"], row) == ("needle-8m", {"row": 1})


@pytest.mark.parametrize("command", [["show-config"], ["plan"]], ids=" ".join)
@pytest.mark.parametrize("place", ["/dev/full", "closed pipe"])
def test_stdout_that_cannot_be_written(monkeypatch, command, place):
    monkeypatch.undo()
    monkeypatch.setenv("COLUMNS", "80")
    if place == "/dev/full":
        stdout = os.open(place, os.O_WRONLY)
    else:
        reader, stdout = os.pipe()
        os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "vllm_sparse_plugin", *command], stdout=stdout, stderr=subprocess.PIPE, text=True
    )
    os.close(stdout)
    said = sentence_of((done.returncode, done.stderr), 2 if place == "/dev/full" else 141)
    reason = "'No space left on device', allowed: a place that can be written"
    assert (
        said
        == f"stdout: got {reason if place == '/dev/full' else 'a closed pipe, allowed: a reader that takes all of it'}"
    )


NEEDS = {
    "eval": (["eval", "--output", "new"], extras.TABLES),
    "eval --file": (["eval", "--output", "new", "--file", "x"], extras.TABLES | extras.METRICS),
    "eval show": (["eval", "show", "x"], extras.TABLES),
    "eval compare": (["eval", "compare", "x", "y"], extras.TABLES),
    "tune": (["tune", "--model", "x", "--prompts", "x"], extras.TABLES),
    "train": (["train", "--data", "x", "--output", "new"], extras.TRAINING),
    "fetch-model": (["fetch-model", "smollm2-135m", "--output", "new"], extras.CONVERSION),
    "real": (["real"], extras.CONVERSION | extras.STATISTICS),
}


@pytest.mark.parametrize(("case", "module"), [(case, module) for case in NEEDS for module in NEEDS[case][1]])
def test_a_package_that_is_missing(run, monkeypatch, case, module):
    command, packages = NEEDS[case]
    pretend(monkeypatch, packages, module)
    said = sentence_of(run(*command))
    assert said.startswith(f"vllm-sparse {command[0]}: got no {packages[module]}, allowed: with ")
    line = said.partition("extra, ")[2]
    assert line.startswith("pip install ")
    # The package name `vllm` would install the CUDA build into an environment with the CPU build.
    assert packages[module] in line
    assert "vllm" not in line


def test_a_package_that_goes_missing_within_a_run_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    answer = {
        "id": "kv/4096/0", "task": "kv", "context_tokens": 4096, "prompt_tokens": 1, "forced_tokens": 0, "digest": "0",
        "answers": ["a"], "completion": "a", "metric": "exact_first_line", "score": 1, "seconds": 1,
    }  # fmt: skip
    put("results.jsonl", RESULTS + json.dumps(answer).encode() + b"\n")
    said = sentence_of(run("eval", "show", "results.jsonl", "--plot", "x.png"))
    assert said.startswith("matplotlib: got no such package, allowed: pip install ")


INTERRUPTED = {
    "show-config": ([], "tools.cli.show_config.notices_of"),
    "plan": ([], "tools.cli.plan._pool"),
    "needles": ([], "tools.cli.needle_test._ask_all"),
    "diagnose": (["--prompts", "data.jsonl", "--json", "new"], "tools.diagnostics.forward.CapturingModel"),
    "calibrate": (
        ["--prompts", "long.jsonl", "--context", "64", "--context", "128", "--output", "new"],
        "tools.diagnostics.forward.CapturingModel",
    ),
    "anchors": (
        ["--prompts", "long.jsonl", "--context", "128", "--budget", "64", "--output", "new"],
        "tools.diagnostics.forward.CapturingModel",
    ),
    "tune": (["--model", str(MODEL), "--prompts", "data.jsonl", "--output", "."], "tools.cli.tune._run"),
    "fetch-model": (["smollm2-135m", "--output", "new"], "tools.fetching._obtain"),
    "real": (["--json", "new"], "tools.fetching._obtain"),
    "train": (
        ["--data", "long.jsonl", "--output", "new", "--settings", '{"sequence_tokens": 2048}'],
        "tools.training.trainer.Trainer",
    ),
    "eval": (
        ["--completions", "data.jsonl", "--in-process", "--model", str(MODEL), "--output", "new"],
        "tools.cli.evaluate._Answerer.endpoint",
    ),
}
"""Arguments with which a command starts its work, and the function that it calls."""


@pytest.mark.parametrize("number", endings._SIGNALS)
@pytest.mark.parametrize("command", INTERRUPTED)
def test_a_signal_ends_the_command_in_one_sentence(run, monkeypatch, command, number):
    arguments, place = INTERRUPTED[command]
    pretend(monkeypatch, extras.CONVERSION)
    put("data.jsonl", WHOLE.encode() * 2)
    put("long.jsonl", (json.dumps({"prompt": "x = 1\n" * 800, "completion": "y = 2\n" * 800}) + "\n").encode() * 2)
    owner, _, name = place.rpartition(".")
    if owner.endswith("_Answerer"):
        owner = importlib.import_module(f"vllm_sparse_plugin.{owner.rpartition('.')[0]}")._Answerer
    else:
        owner = importlib.import_module(f"vllm_sparse_plugin.{owner}")
    monkeypatch.setattr(owner, name, lambda *_, **__: signal.raise_signal(number))
    said = sentence_of(run(command, *arguments), 128 + number)
    assert said == f"{endings._SIGNALS[number]}: stopping; repeat to kill the processes that still run"
    # A run without a result leaves no file.
    assert sorted(path.name for path in Path().iterdir()) == ["data.jsonl", "long.jsonl"]


def test_the_exit_code_stays_where_ctrl_c_comes_while_a_text_is_executed(monkeypatch, tmp_path):
    monkeypatch.undo()
    (tmp_path / "command.py").write_text(
        "import signal\n"
        "from vllm_sparse_plugin.tools import endings\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "endings.run(lambda: exec('signal.raise_signal(signal.SIGINT)'))\n"
    )
    done = subprocess.run([sys.executable, "-m", "command"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert sentence_of((done.returncode, done.stderr), 130).startswith("Ctrl-C: stopping; ")


def test_signals_that_a_shell_has_switched_off_stay_so(run, monkeypatch):
    seen = []
    from vllm_sparse_plugin.tools.cli import show_config

    monkeypatch.setattr(show_config, "notices_of", lambda *_: seen.append(signal.getsignal(signal.SIGHUP)) or [])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run("show-config")[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIG_IGN]


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vllm-sparse", "show-config"])
    from vllm_sparse_plugin.tools.cli import show_config

    def fail(*_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(show_config, "notices_of", fail)
    with pytest.raises(RuntimeError, match="ours"):
        main()


def test_memory_that_runs_out_is_no_traceback(run, monkeypatch):
    from vllm_sparse_plugin.tools.cli import show_config

    for error in (
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory."),
    ):
        monkeypatch.setattr(show_config, "notices_of", lambda *_, error=error: (_ for _ in ()).throw(error))
        assert sentence_of(run("show-config"), 3).startswith("memory ran out: ")


def test_names_with_bytes_that_are_no_text(run, monkeypatch):
    name = os.fsdecode(b"\xff.jsonl")
    put(name, WHOLE.encode())
    put("answers.jsonl", RESULTS)
    assert sentence_of(run("eval", "show", name)).startswith("results: got '\\udcff.jsonl' (line 1: ")
    base = ["eval", "--in-process", "--model", MODEL, "--output", "new"]
    said = sentence_of(run(*base, "--completions", name))
    assert said == "file: got the name '\\udcff.jsonl', allowed: names of UTF-8 text"
    assert sentence_of(run("show-config", "--attention-backend", name)).startswith("attention_backend: got '\\udcff")
    said = sentence_of(run("eval", "show", "answers.jsonl", "--plot", os.fsdecode(b"\xff.png")))
    assert said == "plot: got files without a result, allowed: files with one or more"


def test_a_configuration_of_another_model_is_not_measured(run):
    """Weights missing in the file would be random."""
    model = damaged_model("config.json", b"")
    config = json.loads((MODEL / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    said = sentence_of(run("diagnose", "--model", model, "--prompts", put("data.jsonl", WHOLE.encode())))
    assert said.startswith("model: got 'model' without ")
    assert said.endswith("allowed: weights and a config.json of the same model")


def test_a_folder_without_a_place_for_logs(monkeypatch):
    from vllm_sparse_plugin.errors import ConfigurationError
    from vllm_sparse_plugin.tools import server

    monkeypatch.setattr(server.tempfile, "mkstemp", lambda **_: (_ for _ in ()).throw(OSError(28, "No space left")))
    settings = server.ServerSettings(MODEL, 4096, None)
    with pytest.raises(
        ConfigurationError, match=r"^TMPDIR: got no folder for a server's log \(No space left\), allowed"
    ):
        server.LaunchedServer("dense", settings)


def test_compiled_kernels_have_a_folder_where_the_home_cannot_be_written(monkeypatch, tmp_path):
    from vllm_sparse_plugin.tools import caches

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
    caches.ensure_caches()
    assert len(removed) == 1
    shutil.rmtree(removed[0])
