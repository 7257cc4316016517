"""Steps that compute a token of a prompt call layers that keep its query."""

import inspect
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import model_runner

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.attention import base
from vllm_sparse_plugin.compaction.step import keep_queries
from vllm_sparse_plugin.metrics import request_log

SPARSE, SHORT, PROMPT = (1, 2000), (1, 999), (512, 5000)
"""Requests of a step: query tokens, and tokens of the context."""


class FakeRunner:
    in_prompt = False
    """Whether a step computes a token of a prompt."""

    def initialize_kv_cache(self):
        return None

    def get_kv_cache_spec(self):
        return {}


class State(NamedTuple):
    decode_graph_eligible: bool
    is_prefilling_np: np.ndarray


class NewerRunner(FakeRunner):
    """The seam of vLLM's second model runner: it replays a full graph where all requests have as many tokens."""

    def gather_batch_req_state(self, scheduler_output, dummy_run):
        counts = set(scheduler_output.num_scheduled_tokens.values())
        state = None if dummy_run else State(len(counts) == 1, np.array([False, self.in_prompt]))
        return state, (counts.pop() if len(counts) == 1 else None)

    def replays(self, *requests, dummy_run=False):
        step = SimpleNamespace(num_scheduled_tokens=dict(enumerate(query for query, _ in requests)))
        state, tokens_of_each = self.gather_batch_req_state(step, dummy_run)
        # Drafters ask the state.
        assert dummy_run or state.decode_graph_eligible == (tokens_of_each is not None)
        return tokens_of_each is not None


class OlderRunner(FakeRunner):
    """The same of the first."""

    def _determine_batch_execution_and_padding(self, num_scheduled_tokens_np, force_uniform_decode=None):
        if force_uniform_decode is not None:
            return force_uniform_decode
        return len(set(num_scheduled_tokens_np.tolist())) == 1

    def replays(self, *requests, dummy_run=False):
        queries = np.array([query for query, _ in requests])
        computed = np.array([context - query for query, context in requests] + [9000])
        prompts = computed + 1 if self.in_prompt else computed
        self.input_batch = SimpleNamespace(num_computed_tokens_cpu=computed, num_prompt_tokens=prompts)
        forced = {"force_uniform_decode": True} if dummy_run else {}
        return self._determine_batch_execution_and_padding(num_scheduled_tokens_np=queries, **forced)


@pytest.fixture(params=[NewerRunner, OlderRunner], ids=["newer", "older"])
def runners(request, monkeypatch):
    """Two workers of one model."""
    # Hooks change the class itself.
    methods = {name: method for base in (FakeRunner, request.param) for name, method in vars(base).items()}
    made = type("Runner", (), {name: method for name, method in methods.items() if callable(method)})
    made.vllm_config, made.in_prompt = None, False
    monkeypatch.setattr(compat.runners, "_RUNNER_MODULES", ("a.runner",))
    monkeypatch.setitem(sys.modules, "a.runner", SimpleNamespace(GPUModelRunner=made))
    for _ in range(2):
        compat.hook_model_runners(
            nullcontext, lambda specs: specs, lambda *new: None, base.calls_layers, request_log.finish, print, print
        )
    return made(), made()


def test_a_step_with_a_token_of_a_prompt_calls_layers_that_keep_its_query(runners):
    """vLLM computes one token of a prompt like a decoding token. The query of a replayed graph would not vote."""
    for runner in runners:
        assert runner.replays(SHORT)
        runner.in_prompt = True
        assert runner.replays(SHORT)
    keep_queries(runners[0])
    assert not runners[0].replays(SHORT, SHORT)
    assert runners[1].replays(SHORT, SHORT)
    assert runners[0].replays(SHORT, dummy_run=True)
    runners[0].in_prompt = False
    assert runners[0].replays(SHORT, SHORT)


def test_vllms_runners_are_as_they_are_faked():
    newer, older = model_runner.GPUModelRunner, gpu_model_runner.GPUModelRunner
    assert list(inspect.signature(newer.gather_batch_req_state).parameters)[1:] == ["scheduler_output", "dummy_run"]
    assert {"decode_graph_eligible", "is_prefilling_np"} <= set(model_runner.BatchReqState._fields)
    determine = inspect.signature(older._determine_batch_execution_and_padding).parameters
    assert {"num_scheduled_tokens_np", "force_uniform_decode"} <= set(determine)
    assert not hasattr(older, "gather_batch_req_state")
    assert {"num_scheduled_tokens", "finished_req_ids"} <= set(SchedulerOutput.__dataclass_fields__)
    for runner in (newer, older):
        assert list(inspect.signature(runner.execute_model).parameters)[1] == "scheduler_output"


def test_a_runner_that_is_not_ours_runs_as_before(runners):
    assert all(runner.replays(SPARSE) for runner in runners for _ in range(4))
    assert not any(runner.replays(SPARSE, PROMPT) for runner in runners)
