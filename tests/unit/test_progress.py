import io
import threading

from rich.console import Console

from vllm_sparse_plugin.tools.eval import progress
from vllm_sparse_plugin.tools.eval.progress import show_progress


class Lines(io.StringIO):
    """Says when it has a third line."""

    def __init__(self) -> None:
        super().__init__()
        self.third = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\n") >= 3:
            self.third.set()
        return written


def test_without_a_terminal_lines_come_though_nothing_happens(monkeypatch):
    assert progress.LINE_SECONDS < 20
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.001)
    file = Lines()
    with show_progress(Console(file=file), "Starting"):
        assert file.third.wait(60)
    lines = file.getvalue().splitlines()
    assert lines[0] == "Starting"
    assert lines[1].startswith("Starting: 0 s")


def test_lines_say_how_many_steps_are_done(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.001)
    file = Lines()
    with show_progress(Console(file=file), "dense", 3) as advance:
        advance("dense: kv")
        file.truncate(0)
        file.third.clear()
        assert file.third.wait(60)
    assert file.getvalue().strip("\0").splitlines()[-1].startswith("dense: kv: 33%, 0 s, less than a minute left")


def test_a_terminal_gets_a_bar_and_no_lines():
    file = io.StringIO()
    with show_progress(Console(file=file, force_terminal=True, width=80), "dense", 2) as advance:
        advance("dense: kv")
    assert "━" in file.getvalue()
    assert "50%" in file.getvalue()
