import subprocess
import sys

import pytest


@pytest.fixture
def refused(monkeypatch, capsys):
    """Calls a command line that must end in one sentence before an engine starts."""

    def started(command, **_kwargs):
        if command[0] in ("git", "nvidia-smi"):
            raise FileNotFoundError
        raise AssertionError("a process was started")

    def call(main, *arguments: str) -> str:
        monkeypatch.setattr(subprocess, "Popen", started)
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        assert err.startswith("error: ")
        assert len(err.splitlines()) == 1
        return err.removeprefix("error: ").rstrip("\n")

    return call
