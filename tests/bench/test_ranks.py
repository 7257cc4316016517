"""Data-parallel engines of which one has no requests."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from bench.common.continuations import Continuation
from bench.robustness.deployments.cells import EQUAL, NOT_HERE
from bench.robustness.families.cells import FAILED, REFUSED
from bench.robustness.families.table import FAMILIES
from bench.robustness.ranks import command
from bench.robustness.ranks.command import MODELS, SETTINGS, answers_by_engine, try_ranks
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.tools.server import ServerError

RIGHT = Continuation([5, 6], [{5: -0.1, 9: -3.0}, {6: -0.7}])
WRONG = Continuation([9, 6], [{9: -0.1, 5: -3.0}, {6: -0.7}])
METRICS = 'vllm:request_success_total{{engine="{}",finished_reason="{}",model_name="m"}} {}\n'


def metrics(*answers: int) -> str:
    lines = [METRICS.format(engine, "length", count) for engine, count in enumerate(answers)]
    # vLLM does not sort them.
    return "".join(lines[::-1]) + METRICS.format(0, "abort", 7)


def test_answers_are_counted_by_engine():
    assert answers_by_engine(metrics(6, 3)) == [6, 3]


def test_settings_are_of_the_backends():
    for name, settings in SETTINGS.items():
        resolve(settings, name)
    assert set(MODELS.values()) <= set(FAMILIES)


def tried(monkeypatch, tmp_path, wrong=(), counted=(6, 3), fails=False):
    """The cell of a server whose engines answer wrongly in some rounds."""
    rounds = []

    @contextmanager
    def ready(folder, backend, engines, start_seconds):
        if fails:
            raise ServerError("the server ended\nits log")
        yield SimpleNamespace(client=engines, explain_failures=lambda: ready_to_explain())

    @contextmanager
    def ready_to_explain():
        yield

    def ask(engines, model, engine=None):
        rounds.append((engines, engine))
        return [WRONG if len(rounds) - 1 in wrong else RIGHT] * 3

    for name, value in {"ready": ready, "ask": ask, "metrics_text": lambda _: metrics(*counted)}.items():
        monkeypatch.setattr(command, name, value)
    monkeypatch.setattr(command, "expect_admitted", lambda *_: None)
    cell = try_ranks("dense, unique", "dense", tmp_path, "unique", 1)
    return cell, rounds


def test_engines_are_asked_one_after_the_other(monkeypatch, tmp_path):
    cell, rounds = tried(monkeypatch, tmp_path)
    assert (cell.outcome, cell.asked, rounds) == (EQUAL, 9, [(1, None), (2, 0), (2, 1), (2, 0)])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"wrong": (3,)}, "an answer parts where the tokens' log probabilities differ by 2.9"),
        ({"counted": (9, 0)}, "the engines answered [9, 0] questions"),
        ({"fails": True}, "the server ended"),
    ],
)
def test_a_wrong_answer_or_engine_is_a_failure(monkeypatch, tmp_path, changes, reason):
    cell, _ = tried(monkeypatch, tmp_path, **changes)
    assert (cell.outcome, cell.reason) == (FAILED, reason)


@pytest.mark.parametrize("backend", ["snapkv", "lossless", "unique"])
def test_what_several_engines_do_not_serve_is_refused_before_a_start(monkeypatch, tmp_path, backend):
    started = []

    def ready(*_):
        started.append(True)
        raise ServerError("started")

    monkeypatch.setattr(command, "ready", ready)
    FAMILIES[MODELS["dense"]].write(tmp_path)
    cell = try_ranks("x", "dense", tmp_path, backend, 1)
    assert bool(started) == (backend == "unique")
    if not started:
        assert cell.outcome == REFUSED
        assert "got 2 data-parallel engines" in cell.reason


def test_a_cpu_has_no_experts_in_several_engines(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "describe_gpu", dict)
    assert try_ranks("x", "experts", tmp_path, "unique", 1).outcome == NOT_HERE
