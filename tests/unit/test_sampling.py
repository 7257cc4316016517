"""Measured steps: the same for all workers, outside full graphs, and never a step without requests."""

import gc
import inspect
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from support.logs import said
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import model_runner

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.attention import base
from vllm_sparse_plugin.attention.metering import sampled_steps
from vllm_sparse_plugin.compaction.step import keep_queries
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.metrics import request_log, sampling
from vllm_sparse_plugin.metrics.sampling import StepSampler

SPARSE, SHORT, PROMPT = (1, 2000), (1, 999), (512, 5000)


@pytest.mark.parametrize("every", [1, 3])
def test_one_step_in_so_many_is_measured_and_not_always_the_same_of_it(every):
    sampler = StepSampler(every, 1000)
    measured = []
    for step in range(40 * every):
        assert sampler.begin(lambda: [SHORT, SPARSE]) == (sampler.sample is not None)
        if sampler.sample:
            measured.append((step, sampler.sample))
    assert [step for step, _ in measured] == list(range(every - 1, 40 * every, every))
    # All pairs of one of 4 tokens and one of 2 groups of layers.
    assert len({(sample.token % 4, sample.layers % 2) for _, sample in measured}) == 8


def test_a_step_is_measured_when_some_request_leaves_something_out():
    sampler = StepSampler(2, 1000, longest_query=4)
    assert not sampler.begin(lambda: [SPARSE])
    for requests in ([], [SHORT], [PROMPT], [(5, 2000)]):
        assert not sampler.begin(lambda requests=requests: requests)
    assert sampler.begin(lambda: [PROMPT, (4, 1000)])


def test_steps_of_nobody_and_steps_without_sampling_measure_nothing():
    sampler = StepSampler(1)
    assert sampler.begin(lambda: [SPARSE])
    assert not sampler.begin(None)
    assert sampler.sample is None
    assert not StepSampler(0).begin(lambda: pytest.fail("there is nothing to know"))


def test_a_server_measures_itself_unasked(monkeypatch):
    def steps(preset: str = "unique", **diagnostics: int) -> int:
        return sampled_steps(resolve({"diagnostics": diagnostics}, preset))

    assert (steps(), steps("art"), steps(sample_every=7), steps(sample_every=0)) == (1024, 1024, 7, 0)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert (steps(), steps(sample_every=7), steps(sample_every=0)) == (4096, 7, 0)
    # On a GPU a token whose attention may stop is costly to measure.
    assert (steps("art"), steps("art", sample_every=7)) == (0, 7)


class FakeScheduler:
    """Steps as vLLM's scheduler tells workers of them: of `(query tokens, context)`."""

    def __init__(self, *requests: tuple[int, int]) -> None:
        names = [str(number) for number in range(len(requests))]
        self.num_scheduled_tokens = {name: query for name, (query, _) in zip(names, requests, strict=True)}
        known = [(name, context - query) for name, (query, context) in zip(names, requests, strict=True)]
        # One that is known, and waits in this step.
        known.append(("waits", 9000))
        self.scheduled_cached_reqs = SimpleNamespace(
            req_ids=[name for name, _ in known], num_computed_tokens=[computed for _, computed in known]
        )


class FakeRunner:
    in_prompt = False
    """Whether a step computes a token of a prompt."""

    def initialize_kv_cache(self):
        return sampling.of_runner(self, StepSampler(3, 1000))

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
        state, tokens_of_each = self.gather_batch_req_state(FakeScheduler(*requests), dummy_run)
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
            nullcontext, lambda specs: specs, lambda *new: None, base.begin_step, request_log.finish, print, print
        )
    return made(), made()


def test_workers_leave_full_graphs_in_the_same_steps_and_measure_the_same(runners):
    builders = [[runner.initialize_kv_cache() for _ in range(2)] for runner in runners]
    assert builders[0][0] is builders[0][1]
    assert builders[0][0] is not builders[1][0]
    seen = []
    # A dummy run, as of another data-parallel engine, is counted by nobody.
    steps = [[SPARSE], [SPARSE, SHORT], [SPARSE] * 3, [SHORT] * 2, None, [SPARSE], [SHORT], [SPARSE, SHORT], [SPARSE]]
    for step in steps:
        for runner, (sampler, _) in zip(runners, builders, strict=True):
            in_graph = runner.replays(*(step or [SPARSE]), dummy_run=step is None)
            seen.append((in_graph, sampler.sample))
    assert seen[::2] == seen[1::2]
    assert [in_graph for in_graph, _ in seen[::2]] == [True, True, False, True, True, True, True, False, True][
        : len(steps)
    ]
    assert [sample is None for _, sample in seen[::2]] == [in_graph for in_graph, _ in seen[::2]]


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
    assert {"req_ids", "num_computed_tokens"} <= set(CachedRequestData.__dataclass_fields__)
    assert {"num_scheduled_tokens", "finished_req_ids"} <= set(SchedulerOutput.__dataclass_fields__)
    for runner in (newer, older):
        assert list(inspect.signature(runner.execute_model).parameters)[1] == "scheduler_output"


def test_a_runner_that_is_not_ours_runs_as_before(runners):
    assert all(runner.replays(SPARSE) for runner in runners for _ in range(4))
    assert not any(runner.replays(SPARSE, PROMPT) for runner in runners)


def test_samplers_go_with_their_runners():
    # Runners of other tests that only wait for the collector go first.
    gc.collect()
    runner = FakeRunner()
    shared = sampling.of_runner(runner, StepSampler(1))
    assert sampling.of_runner(runner, StepSampler(1)) is shared
    known = len(sampling._samplers)
    del runner
    gc.collect()
    assert len(sampling._samplers) == known - 1
    # Layers without a runner have separate samplers.
    assert sampling.of_runner(None, shared) is shared
    assert len(sampling._samplers) == known - 1


def test_a_sampler_that_fails_leaves_the_step_in_its_graph(runners, monkeypatch):
    def fail(*arguments: object) -> bool:
        raise RuntimeError("no lengths")

    monkeypatch.setattr(sampling, "_reported", set())
    warnings = said(monkeypatch, "vllm.vllm_sparse_plugin.metrics.sampling", "warning")
    for runner in runners:
        runner.initialize_kv_cache()
    monkeypatch.setattr(StepSampler, "begin", fail)
    assert all(runner.replays(SPARSE) for runner in runners for _ in range(4))
    (line,) = warnings
    assert line.endswith("a token cannot be measured (RuntimeError: no lengths)")
