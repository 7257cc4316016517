"""Every command ends with one sentence where its output cannot be written, and loses nothing."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.mistakes import MODEL, RESULTS, WHOLE, put, sentence_of

from vllm_sparse_plugin.tools import endings

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
    texts = ({"prompt": f"x = {number}\n" * 800, "completion": "y = 2\n" * 800} for number in (1, 2))
    put("long.jsonl", "".join(json.dumps(text) + "\n" for text in texts).encode())
    put("results.jsonl", RESULTS)
    if place == "a folder":
        Path("there.png").mkdir()
    elif place == "a file":
        Path("there.png").touch()
    elif place == "/dev/full":
        Path("full.png").symlink_to(place)  # pictures are named so
    place = {"/dev/full": "full.png", "missing/file": "missing/file.png"}.get(place, "there.png")
    # This is checked before anything is measured.
    monkeypatch.setattr(endings.Console, "print", lambda *_, **_options: pytest.fail("it began"))
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


PRINTS = {
    "--help": [],
    "--version": [],
    "show-config": [],
    "plan": [],
    "eval show": ["results.jsonl"],
    "eval compare": ["results.jsonl", "results.jsonl"],
    "diagnose": ["--prompts", "data.jsonl", "--context", "512", "--json", "report.jsonl"],
}
"""Arguments of commands that print."""
ANSWER = {
    "id": "kv/4096/0", "task": "kv", "context_tokens": 4096, "prompt_tokens": 1, "forced_tokens": 0, "digest": "0",
    "answers": ["a"], "completion": "a", "metric": "exact_first_line", "score": 1, "seconds": 1,
}  # fmt: skip


def run_installed(monkeypatch, folder: Path, command: str, **streams: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    put("results.jsonl", RESULTS + json.dumps(ANSWER).encode() + b"\n")
    put("data.jsonl", (json.dumps({"prompt": "x = 1\n" * 200}) + "\n").encode())
    python = [sys.executable, "-m", "vllm_sparse_plugin"]
    return subprocess.run([*python, *command.split(), *PRINTS.get(command, [])], text=True, **streams)


@pytest.mark.parametrize(
    ("place", "command"),
    [
        *(("/dev/full", command) for command in ("--help", "--version", "show-config", "eval show", "diagnose")),
        *(("closed pipe", command) for command in ("--help", "--version", "show-config", "eval compare", "plan")),
    ],
)
def test_stdout_that_cannot_be_written(monkeypatch, tmp_path, command, place):
    if place == "/dev/full":
        stdout = os.open(place, os.O_WRONLY)
    else:
        reader, stdout = os.pipe()
        os.close(reader)
    done = run_installed(monkeypatch, tmp_path, command, stdout=stdout, stderr=subprocess.PIPE)
    os.close(stdout)
    if place == "closed pipe":
        assert done.stderr == ""
        return
    said = sentence_of((done.returncode, done.stderr))
    assert said == "stdout: got 'No space left on device', allowed: a place that can be written"


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
