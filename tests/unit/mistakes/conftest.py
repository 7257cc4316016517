import signal
import subprocess
import sys

import pytest

from vllm_sparse_plugin.tools import endings
from vllm_sparse_plugin.tools.cli import main


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
