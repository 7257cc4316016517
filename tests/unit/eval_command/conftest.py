import sys
from pathlib import Path

import pytest
from support.completions import StubServer, serve
from support.eval_command import MODEL, find, tokenizer

from vllm_sparse_plugin.tools.cli import main


@pytest.fixture
def stub():
    with serve(StubServer(find, tokenizer().decode)) as running:
        yield running


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "results.jsonl"


@pytest.fixture
def run(monkeypatch, capsys, stub, output):
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str, base: tuple[str, ...] | None = None) -> tuple[int, str, str]:
        if base is None:
            base = ("--base-url", stub.url, "--tokenizer", str(MODEL), "--output", str(output))
        monkeypatch.setattr(sys, "argv", ["vllm-sparse", "eval", *base, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call
