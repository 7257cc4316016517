"""Result files belong to one run, model and set of settings."""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.eval_command import MODEL, NEEDLES, cells, find, refused

from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.tools.cli import evaluate
from vllm_sparse_plugin.tools.eval.endpoints import EndpointError, Reply, Request
from vllm_sparse_plugin.tools.eval.results import read_results
from vllm_sparse_plugin.tools.needles import library_text


class ScoringEngine:
    """Answers every question; counts how often an engine was started."""

    started = 0

    def __init__(self, *_: object) -> None:
        type(self).started += 1

    def complete(self, requests: Iterable[Request]) -> Iterator[Reply]:
        for request in requests:
            assert request.ignores_end
            yield Reply([], [-0.5] * len(request.forced), 0.1, (), None)

    def close(self) -> None:
        pass


@pytest.fixture
def evaluate_in_process(run, tmp_path, output, monkeypatch):
    """Scores a prompt with a copy of needle-8m in a folder of the same name; returns the refusal."""
    monkeypatch.setattr(ScoringEngine, "started", 0)
    monkeypatch.setitem(sys.modules, "vllm_sparse_plugin.tools.eval.engine", SimpleNamespace(Engine=ScoringEngine))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x = 1\n" * 400}))

    def call(model: Path, *arguments: str) -> str | None:
        base = ("--in-process", "--model", str(model), "--output", str(output))
        result = run("--completions", str(prompts), "--scored-tokens", "8", *arguments, base=base)
        return None if result[0] == 0 else refused(result)

    return call


@pytest.mark.parametrize("change", ["weights", "tokenizer_config.json"])
def test_results_of_a_model_are_not_taken_for_those_of_another_one(evaluate_in_process, output, tmp_path, change):
    first, second = tmp_path / "a" / "model", tmp_path / "b" / "model"
    for folder in (first, second):
        shutil.copytree(MODEL, folder)
    assert evaluate_in_process(first) is None
    # The same model elsewhere: nothing is left to do, and no engine starts.
    assert evaluate_in_process(second) is None
    assert ScoringEngine.started == 1
    before = output.read_bytes()
    changed = second / ("model.safetensors" if change == "weights" else change)
    if change == "weights":
        content = bytearray(changed.read_bytes())
        content[-1] ^= 1
        changed.write_bytes(content)
    else:
        changed.write_text(json.dumps(json.loads(changed.read_text()) | {"note": 1}))
    which = "tokenizer" if change == "tokenizer_config.json" else "contents"
    assert evaluate_in_process(second).startswith(f"output: got {str(output)!r} made with {which} {{")
    assert ScoringEngine.started == 1
    assert output.read_bytes() == before


def test_a_file_that_settings_name_may_not_change_under_a_run(evaluate_in_process, output, tmp_path):
    settings = tmp_path / "my.yaml"
    settings.write_text("selection: {policy: unique, budget_tokens: 512}\n")
    given = ("--attention-backend", "unique", "--additional-config", json.dumps({KEY: {"config": str(settings)}}))
    assert evaluate_in_process(MODEL, *given) is None
    settings.write_text("# the same\nselection: {budget_tokens: 512, policy: unique}\n")
    assert evaluate_in_process(MODEL, *given) is None
    settings.write_text("selection: {policy: unique, budget_tokens: 256}\n")
    assert "made with contents" in evaluate_in_process(MODEL, *given)
    settings.write_text("selection: {policy: nope}\n")
    assert evaluate_in_process(MODEL, *given).startswith("sparse_attention.selection")


def test_versions_may_not_change_under_a_run(evaluate_in_process, output, monkeypatch):
    package = "torch"
    assert evaluate_in_process(MODEL) is None
    before, versions_of = output.read_bytes(), evaluate.versions_of
    monkeypatch.setattr(evaluate, "versions_of", lambda packages: versions_of(packages) | {package: "99"})
    assert evaluate_in_process(MODEL).startswith(f"output: got {str(output)!r} made with versions {{")
    assert ScoringEngine.started == 1
    assert output.read_bytes() == before


SPARSE = 'vllm_sparse_settings_info{backend="unique",settings="{budget}"} 1.0\n'
CACHE = 'vllm:cache_config_info{block_size="64",cache_dtype="auto",num_gpu_blocks="%d"} 1.0\n'


def test_a_server_of_other_settings_is_another_run(run, stub, output):
    stub.metrics = CACHE % 7 + SPARSE.replace("{budget}", "1024")
    assert run(*NEEDLES)[0] == 0
    assert read_results(output).settings["server"] == {
        "vllm": "0.32.0", "root": None, "max_model_len": 8192,
        "cache": {"block_size": "64", "cache_dtype": "auto"},
        "sparse_attention": {"backend": "unique", "settings": "1024"},
    }  # fmt: skip
    stub.requests.clear()
    # A restart finds other memory, which changes no answer.
    stub.metrics = CACHE % 9 + SPARSE.replace("{budget}", "1024")
    assert run(*NEEDLES)[0] == 0
    stub.metrics = CACHE % 9 + SPARSE.replace("{budget}", "256")
    assert "made with server {" in refused(run(*NEEDLES))
    stub.metrics = CACHE % 9
    assert "made with server {" in refused(run(*NEEDLES))
    assert not stub.requests


def test_ctrl_c_does_not_wait_for_a_server_that_does_not_answer(run, stub, output):
    never = threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def answer(_: list[int]) -> list[int]:
        os.kill(os.getpid(), signal.SIGINT)
        never.wait()
        return []

    stub.answer = answer
    try:
        code, _, err = run(*NEEDLES)
        assert (code, err) == (130, "Ctrl-C: stopping\n")
        # A thread that is not a daemon would keep the process alive.
        assert all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
    finally:
        never.set()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_in_the_process_is_ended(run, output, monkeypatch, fails):
    """At the interpreter's exit, the processes of a GPU's engine were waited for forever."""
    ended = []

    class FakeEngine:
        def __init__(self, *_: object) -> None:
            pass

        def complete(self, requests: Iterable[Request]) -> Iterator[Reply]:
            for request in requests:
                if fails:
                    raise EndpointError("did not answer a question (it is dead)")
                yield Reply(find(request.prompt), [], 0.1, (), None)

        def close(self) -> None:
            ended.append(len(read_results(output).results))

    monkeypatch.setitem(sys.modules, "vllm_sparse_plugin.tools.eval.engine", SimpleNamespace(Engine=FakeEngine))
    code, _, err = run(*NEEDLES, base=("--in-process", "--model", str(MODEL), "--output", str(output)))
    assert (code, ended) == ((3, [0]) if fails else (0, [4])), err


def test_a_run_that_was_cut_short_goes_on(run, stub, output):
    stub.answers_left = 2
    assert refused(run(*NEEDLES), 3) == (
        "the model stub did not answer a question (HTTP 400: the engine is dead); the same command continues from here"
    )
    assert len(read_results(output).results) == 2
    assert "has 2 of 4 items: the run was interrupted" in run("show", str(output), base=())[1]
    kept = output.read_text()
    output.write_text(kept + '{"id": "multikey/4096/2", "ta')  # the end of a run that was killed
    stub.answers_left = None
    stub.requests.clear()
    code, out, _ = run(*NEEDLES)
    assert code == 0
    assert cells(out, "multikey")[2] == "4"
    text = output.read_text()
    assert text.startswith(kept)
    # Each part begins with the line that describes its run.
    assert ["settings" in line for line in text.splitlines()] == [True, False, False, True, False, False]
    stub.requests.clear()
    assert run(*NEEDLES)[0] == 0
    assert (stub.requests, output.read_text()) == ([], text)


OTHER_SETTINGS = {
    "seed": (["--seed", "1"], "seed 0, allowed: one made with 1"),
    "tasks": (["--task", "kv"], "tasks ['multikey'], allowed: one made with ['multikey', 'kv']"),
}


@pytest.mark.parametrize("case", OTHER_SETTINGS)
def test_a_file_made_with_other_settings_is_refused_and_kept(run, output, case):
    run(*NEEDLES)
    text = output.read_text()
    more, sentence = OTHER_SETTINGS[case]
    assert refused(run(*NEEDLES, *more)) == f"output: got {str(output)!r} made with {sentence}, or a new file"
    assert output.read_text() == text


def test_another_file_of_the_same_name_is_noticed(run, output, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(library_text(0, 60_000))
    ask = ["--text", str(text), "--context", "2048", "--questions", "2", "--scored-tokens", "8"]
    assert run(*ask)[0] == 0
    text.write_text(library_text(5_000, 60_000))
    assert "made with files {'text.txt': " in refused(run(*ask))


def test_a_pipe_whose_contents_a_later_run_cannot_compare_is_refused(run, stub, output, tmp_path):
    """A pipe is empty after the questions were read: every pipe had the digest of nothing, and questions of another
    pipe counted as answered."""
    stub.answer = lambda _: []
    for count in (400, 500):
        reader, writer = os.pipe()
        os.write(writer, (json.dumps({"prompt": "x = 1\n" * count}) + "\n").encode())
        os.close(writer)
        pipe = tmp_path / "prompts.jsonl"
        pipe.unlink(missing_ok=True)
        pipe.symlink_to(f"/dev/fd/{reader}")
        sentence = refused(run("--completions", str(pipe), "--scored-tokens", "8"))
        os.close(reader)
        assert sentence == f"file: got {str(pipe)!r} (no regular file), allowed: a file that can be read again"
    assert not stub.requests


def test_the_key_of_a_server_is_not_written(run, stub, output, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    run(*NEEDLES)
    assert "secret-key" not in output.read_text()
