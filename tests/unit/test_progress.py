import io

from rich.console import Console

from vllm_sparse_plugin.tools.eval import progress
from vllm_sparse_plugin.tools.eval.progress import show_progress


def test_without_a_terminal_lines_come_at_most_every_few_seconds(monkeypatch):
    file, now = io.StringIO(), iter((100.0, 101.0, 116.0, 117.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with show_progress(Console(file=file, width=80), "dense", 4) as advance:
        for text in ("dense: kv", "dense: vt", None):
            advance(text)
    assert file.getvalue().splitlines() == ["dense", "dense: vt: 50%, 16 s"]


def test_a_terminal_gets_a_bar_and_no_lines():
    file = io.StringIO()
    with show_progress(Console(file=file, force_terminal=True, width=80), "dense", 2) as advance:
        advance("dense: kv")
    assert "━" in file.getvalue()
    assert "50%" in file.getvalue()
