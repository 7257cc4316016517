"""A log line for each finished request, if the setting is on."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.logs import said

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.metrics import request_log
from vllm_sparse_plugin.requests.rows import BatchRows, preempt


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    return said(monkeypatch, "vllm.vllm_sparse_plugin.metrics.request_log", "info")


class Runner:
    def initialize_kv_cache(self):
        return request_log.of_runner(self)

    def get_kv_cache_spec(self):
        return {}

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        return scheduler_output.finished_req_ids, intermediate_tensors


def ended(*names):
    return SimpleNamespace(finished_req_ids=set(names), preempted_req_ids=None, num_scheduled_tokens={})


def test_a_request_that_ends_says_what_it_has_read(lines, monkeypatch):
    monkeypatch.setattr(compat.runners, "_RUNNER_MODULES", ("a.runner",))
    made = type("Runner", (), {name: method for name, method in vars(Runner).items() if callable(method)})
    monkeypatch.setitem(sys.modules, "a.runner", SimpleNamespace(GPUModelRunner=made))
    for _ in range(2):
        compat.hook_model_runners(
            print, print, print, lambda *step: False, request_log.finish, lambda *names: None, print
        )
    runner = made()
    log = request_log.of_runner(runner)
    assert request_log.of_runner(runner) is log
    for _ in range(3):
        # The third row is padding, and "c" is still in its prompt.
        log.add(["a", "b", None, "c"], np.array([100, 30, 5, 0, 0]), np.array([1000, 40, 5, 0, 0]))
    assert runner.execute_model(ended(), "tensors") == (set(), "tensors")
    assert lines == []
    for name in ("a", "b", "c", "unknown"):
        runner.execute_model(ended(name))
    assert lines == [
        "request a: its decoding tokens read 10.00% of their contexts",
        "request b: its decoding tokens read 75.00% of their contexts",
    ]
    runner.execute_model(ended("a"))
    assert len(lines) == 2
    # A runner without a log logs nothing.
    made().execute_model(ended("a"))
    assert len(lines) == 2


def test_a_name_writes_one_line(lines):
    log = request_log.RequestLog()
    name = "a\nrequest b\x1b[2K\u2028" + "c" * 10**6
    log.add([name], np.array([1]), np.array([4]))
    log.finish([name])
    (line,) = lines
    assert line.startswith("request a\\nrequest b\\x1b[2K\\u2028ccc")
    assert line.isprintable()
    assert len(line) < 400


def test_a_preempted_request_does_not_run_until_a_step_has_it_again(monkeypatch):
    monkeypatch.setattr(compat.runners, "_RUNNER_MODULES", ("a.runner",))
    made = type("Runner", (), {name: method for name, method in vars(Runner).items() if callable(method)})
    monkeypatch.setitem(sys.modules, "a.runner", SimpleNamespace(GPUModelRunner=made))
    compat.hook_model_runners(print, print, print, lambda *step: False, request_log.finish, preempt, print)
    runner = made()
    runner.requests, runner.input_batch = {"a": None, "b": None}, None
    rows = BatchRows(runner)

    def runs(preempted, *scheduled):
        step = ended()
        step.preempted_req_ids, step.num_scheduled_tokens = preempted, dict.fromkeys(scheduled, 1)
        runner.execute_model(step)
        return [name for name in "abc" if rows.runs(name)]

    assert runs(None, "a") == ["a", "b"]  # a request may wait in a step
    assert runs({"b"}, "a") == runs(set(), "a") == ["a"]
    assert runs(set(), "a", "b") == ["a", "b"]
    assert runs({"a"}, "a") == ["a", "b"]
    assert runs({"b"}) == ["a"]
    del runner.requests["b"]
    runs(set())
    runner.requests["b"] = None
    assert runs(set()) == ["a", "b"]
