"""Data-parallel engines of which one has no requests."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import typer

from bench.common.continuations import Continuation
from bench.robustness.deployments.cells import EQUAL, NOT_HERE, ONE_STEP, TIE, Cell
from bench.robustness.families.cells import FAILED, REFUSED
from bench.robustness.families.table import FAMILIES
from bench.robustness.ranks import command
from bench.robustness.ranks.command import CONTROL, MODELS, SETTINGS, answers_by_engine, try_ranks
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


def tried(monkeypatch, tmp_path, wrong=(), counted=(6, 3), fails=False, backend="unique", tie=0.125):
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
    return try_ranks("dense", "dense", tmp_path, backend, 1, tie), rounds


def test_engines_are_asked_one_after_the_other(monkeypatch, tmp_path):
    cell, rounds = tried(monkeypatch, tmp_path)
    assert (cell.outcome, cell.asked, rounds) == (EQUAL, 9, [(1, None), (1, None), (2, 0), (2, 1), (2, 0)])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"wrong": (3,)}, "engines differ: an answer parts where the tokens' log probabilities differ by 2.9"),
        (
            {"wrong": (3,), "tie": 9.0},
            "engines differ: an answer parts where the tokens' log probabilities differ by 2.9",
        ),
        ({"wrong": (4,)}, "an answer parts where the tokens' log probabilities differ by 2.9"),
        ({"wrong": (2, 3)}, "an answer parts where the tokens' log probabilities differ by 2.9"),
        ({"counted": (9, 0)}, "the engines answered [9, 0] questions"),
        ({"fails": True}, "the server ended"),
    ],
)
def test_a_wrong_answer_or_engine_is_a_failure(monkeypatch, tmp_path, changes, reason):
    cell, _ = tried(monkeypatch, tmp_path, **changes)
    assert (cell.outcome, cell.reason) == (FAILED, reason)


def test_answers_may_part_as_far_as_those_of_the_control(monkeypatch, tmp_path):
    cell, _ = tried(monkeypatch, tmp_path, wrong=(2, 3, 4), backend=CONTROL)
    assert (cell.outcome, cell.parted, cell.gap) == (TIE, 9, 2.9)
    assert tried(monkeypatch, tmp_path, wrong=(2, 3, 4), tie=cell.gap)[0].outcome == TIE
    assert tried(monkeypatch, tmp_path, wrong=(4,), tie=2.8)[0].outcome == FAILED


def test_answers_after_a_prefix_hit_are_compared_with_each_other(monkeypatch, tmp_path):
    assert tried(monkeypatch, tmp_path, wrong=(1, 4))[0].outcome == EQUAL


def test_the_control_is_tried_first_and_allows_its_gap(monkeypatch, tmp_path):
    tried_with = []

    def try_ranks(name, kind, folder, backend, start_seconds, tie):
        tried_with.append((kind, backend, tie))
        return Cell(name, TIE, gap=0.375 if kind == "experts" else None)

    monkeypatch.setattr(command, "try_ranks", try_ranks)
    monkeypatch.setattr(command, "write_model", lambda *_: None)
    command.ranks(tmp_path / "ranks.jsonl", ["dense", "experts"], ["unique"])
    assert tried_with == [
        ("dense", CONTROL, ONE_STEP), ("dense", "unique", ONE_STEP),
        ("experts", CONTROL, ONE_STEP), ("experts", "unique", 0.375),
    ]  # fmt: skip


def test_a_control_whose_token_was_not_likely_allows_nothing(monkeypatch, tmp_path):
    """The log probabilities of a step name its likeliest tokens only, so this gap has no bound."""
    unlikely = Continuation([7, 6], [{7: -0.1}, {6: -0.7}])
    monkeypatch.setitem(globals(), "WRONG", unlikely)
    cell, _ = tried(monkeypatch, tmp_path, wrong=(4,), backend=CONTROL)
    assert (cell.outcome, cell.parted) == (FAILED, 3)
    allowed = []

    def try_ranks(name, kind, folder, backend, start_seconds, tie):
        allowed.append(tie)
        return cell

    monkeypatch.setattr(command, "try_ranks", try_ranks)
    monkeypatch.setattr(command, "write_model", lambda *_: None)
    with pytest.raises(typer.Exit):
        command.ranks(tmp_path / "ranks.jsonl", ["experts"], ["unique"])
    assert allowed == [ONE_STEP, ONE_STEP]


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
