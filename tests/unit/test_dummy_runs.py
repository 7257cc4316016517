"""A dummy run, as of a data-parallel engine without work, has rows of requests that wait."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.requests.rows import BatchRows, Row, note

DENSE = {"sparse": "dense"}


class Runner:
    def _dummy_run(self, build):
        return build()


class First(Runner):
    """vLLM's first runner keeps the rows of its last step."""

    def __init__(self):
        self.requests = {"a": SimpleNamespace(sampling_params=SimpleNamespace(extra_args=DENSE))}
        self.input_batch = SimpleNamespace(num_reqs=1, req_ids=["a"], num_prompt_tokens=np.array([300, 0]))


class Second(Runner):
    """vLLM's second runner keeps requests that no step schedules."""

    def __init__(self):
        self.req_states = SimpleNamespace(
            index_to_req_id={0: "a"}, req_id_to_index={"a": 0}, prompt_len=SimpleNamespace(np=np.array([300, 0]))
        )
        note(self, [SimpleNamespace(req_id="a", sampling_params=SimpleNamespace(extra_args=DENSE))])


@pytest.mark.parametrize("kind", [First, Second])
def test_the_rows_of_a_dummy_run_are_of_no_request(monkeypatch, kind):
    made = type("GPUModelRunner", (kind,), {"initialize_kv_cache": None, "get_kv_cache_spec": None})
    monkeypatch.setattr(compat.runners, "_RUNNER_MODULES", ("a.runner",))
    monkeypatch.setitem(sys.modules, "a.runner", SimpleNamespace(GPUModelRunner=made))
    monkeypatch.setattr(compat.runners, "_showing", lambda initialize, building: initialize)
    monkeypatch.setattr(compat.runners, "_spreading", lambda get, spread: get)
    for _ in range(2):
        compat.hook_model_runners(print, print, print, lambda *step: False, print, print, print)
    runner, other = made(), made()
    rows, rows_of_other = BatchRows(runner), BatchRows(other)
    dummy = InputBatch.make_dummy(1, 1, InputBuffers(2, 4, torch.device("cpu")))
    step = SimpleNamespace(req_idx=dummy.idx_mapping_np)
    known = [Row("a", 300)]
    assert (rows.of_step(step), rows.arguments(step)) == (known, [DENSE])
    assert runner._dummy_run(lambda: (rows.of_step(step), rows.of(step), rows.arguments(step))) == ([], [], [])
    assert runner._dummy_run(lambda: rows_of_other.of_step(step)) == known
    with pytest.raises(ZeroDivisionError):
        runner._dummy_run(lambda: 1 / 0)
    assert rows.of_step(step) == known
