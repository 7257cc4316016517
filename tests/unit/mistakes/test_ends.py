"""Missing packages, signals and too little memory end every command in one sentence with the right exit code."""

import importlib
import json
import signal
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from support.mistakes import MODEL, RESULTS, WHOLE, pretend, put, sentence_of

from vllm_sparse_plugin.tools import endings, extras
from vllm_sparse_plugin.tools.cli import main
from vllm_sparse_plugin.tools.eval.report import save_figure
from vllm_sparse_plugin.tools.provenance import write_output

NEEDS = {
    "eval": (["eval", "--output", "new"], extras.TABLES),
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
    "tune": (["--model", str(MODEL), "--prompts", "data.jsonl", "--output", "new"], "tools.cli.tune._run"),
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
    texts = ({"prompt": f"x = {number}\n" * 800, "completion": "y = 2\n" * 800} for number in (1, 2))
    put("long.jsonl", "".join(json.dumps(text) + "\n" for text in texts).encode())
    owner, _, name = place.rpartition(".")
    if owner.endswith("_Answerer"):
        owner = importlib.import_module(f"vllm_sparse_plugin.{owner.rpartition('.')[0]}")._Answerer
    else:
        owner = importlib.import_module(f"vllm_sparse_plugin.{owner}")
    monkeypatch.setattr(owner, name, lambda *_, **__: signal.raise_signal(number))
    said = sentence_of(run(*command.split(), *arguments), 128 + number)
    assert said == f"{endings._SIGNALS[number]}: stopping"
    # A run without a result leaves no file.
    assert sorted(path.name for path in Path().iterdir()) == ["data.jsonl", "long.jsonl"]


def write_half(path: Path) -> None:
    path.write_bytes(b"half")
    signal.raise_signal(signal.SIGTERM)


WRITES = {
    "preset.yaml": (Path, "write_text", lambda path: write_output(path, "a new one", "output")),
    "picture.png": (Figure, "savefig", lambda path: save_figure(Figure(), path)),
}
"""Files that are written at once: who writes them, and how."""


@pytest.mark.parametrize("name", WRITES)
def test_a_signal_in_the_middle_of_a_file_keeps_the_last_one(run, monkeypatch, name):
    from vllm_sparse_plugin.tools.cli import show_config

    owner, method, write = WRITES[name]
    path = put(name, b"an old one")
    target = (lambda self, *_, **__: write_half(self)) if owner is Path else (lambda _, part, **__: write_half(part))
    monkeypatch.setattr(owner, method, target)
    monkeypatch.setattr(show_config, "notices_of", lambda *_: write(path))
    sentence_of(run("show-config"), 128 + signal.SIGTERM)
    assert {each.name: each.read_bytes() for each in Path().iterdir()} == {name: b"an old one"}


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
