"""An engine in this process ends with its context, even after an error. A stand-in replaces vLLM's engine."""

from types import SimpleNamespace

import pytest

from bench.common import in_process as engine
from bench.common.in_process import engine_in_process


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """Events of engines, in order."""
    found: list[str] = []

    def start(model: str) -> SimpleNamespace:
        if model == "missing":
            raise OSError("no such model")
        found.append(f"start {model}")
        core = SimpleNamespace(shutdown=lambda: found.append(f"shut down {model}"))
        return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))

    monkeypatch.setattr("vllm.LLM", start)
    monkeypatch.setattr(engine, "free_engines", lambda: found.append("free"))
    return found


def test_an_engine_is_shut_down_before_the_next_one_starts(events):
    for model in ("one", "two"):
        with engine_in_process(model=model):
            events.append("ask")
    assert events == ["start one", "ask", "shut down one", "free", "start two", "ask", "shut down two", "free"]


def test_an_engine_is_shut_down_when_its_block_raises(events):
    with pytest.raises(KeyError), engine_in_process(model="one"):
        raise KeyError
    assert events == ["start one", "shut down one", "free"]


def test_an_engine_that_does_not_start_leaves_nothing(events, monkeypatch):
    with pytest.raises(OSError, match="no such model"), engine_in_process(model="missing"):
        pass
    assert events == ["free"]
    # A failing cleanup must not hide the error.
    monkeypatch.setattr(engine, "free_engines", lambda: 1 / 0)
    with pytest.raises(OSError, match="no such model"), engine_in_process(model="missing"):
        pass
