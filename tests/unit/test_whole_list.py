"""The list of a step's long requests that attend densely."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from sparse_kernels.batch import MOST_STRIPES, WHOLE_TOKENS

pytest.importorskip("vllm")

from support.cuda_layer import BUDGET, Runner, plan_of, start_builder

from vllm_sparse_plugin.attention.cuda import builder as builder_module
from vllm_sparse_plugin.attention.cuda.whole import WHOLE_SCRATCH, LayerHeads, WholeList
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.requests import rows

HEADS = LayerHeads(8, 4, 128)


def whole_list(dense_tokens: int = 1023, tokens_per_request: int = 1) -> WholeList:
    return WholeList([HEADS], tokens_per_request, dense_tokens, torch.device("cpu"))


def listed(whole: WholeList) -> list[int]:
    requests = whole.of_run(0)
    assert requests is not None
    count, *those = requests.requests.tolist()
    return those[:count]


def test_only_long_dense_requests_are_listed() -> None:
    whole = whole_list()
    whole.write(np.array([True, True, False, True]), np.array([WHOLE_TOKENS, WHOLE_TOKENS + 1, 100_000, 50_000]))
    assert listed(whole) == [1, 3]
    whole.write(np.array([False, False]), np.array([100_000, 100_000]))
    assert listed(whole) == []


def test_long_contexts_that_the_settings_call_short_are_listed() -> None:
    """A bound may be a few tokens above the true length."""
    whole = whole_list(dense_tokens=20_000, tokens_per_request=3)
    whole.write(np.zeros(4, dtype=bool), np.array([4096, 20_000, 20_004, 20_100]))
    assert listed(whole) == [1, 2]


def test_without_bounds_every_dense_request_is_listed() -> None:
    whole = whole_list()
    whole.write(np.array([True, False, True]), None)
    assert listed(whole) == [0, 2]


def test_requests_that_pad_a_batch_have_no_bound() -> None:
    whole = whole_list()
    whole.write(np.array([True, True, False, False]), np.array([50_000, 50_000]))
    assert listed(whole) == [0, 1]


def test_no_more_are_listed_than_there_is_room_for() -> None:
    whole = whole_list()
    assert whole.most == 63
    whole.write(np.ones(80, dtype=bool), np.array([50_000] * 80))
    assert listed(whole) == list(range(63))
    requests = whole.of_run(7)
    assert requests is not None
    assert requests.first_request == 7
    room = requests.room(8, 4, 128)
    assert room.requests == 63
    assert room.values.numel() == 63 * 8 * MOST_STRIPES * 512
    assert room.weights.numel() >= 63 * 8 * MOST_STRIPES * 8
    assert requests.scratch.numel() * 4 == WHOLE_SCRATCH


@pytest.mark.parametrize("tokens_per_request", [1, 9, 100])
def test_layers_of_several_shapes_share_the_scratch(tokens_per_request: int) -> None:
    shapes = [HEADS, LayerHeads(2, 16, 256), LayerHeads(16, 1, 64)]
    whole = WholeList(shapes, tokens_per_request, 1023, torch.device("cpu"))
    requests = whole.of_run(0)
    assert (requests is None) == (whole.most == 0)
    if requests is not None:
        for kv_heads, group, size in shapes:
            assert requests.room(kv_heads * tokens_per_request, group, size).requests >= whole.most


def test_the_groups_of_layers_of_a_runner_share_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile of memory leaves room for one. Layers with unlike retentions have metadata builders of their own."""
    made: list[WholeList] = []

    def making(*given: Any) -> WholeList:
        made.append(WholeList(*given))
        return made[-1]

    monkeypatch.setattr(builder_module, "WholeList", making)
    plan = plan_of(resolve(BUDGET, "unique"))
    runners = [Runner(input_batch=None), Runner(input_batch=None)]
    for runner in (runners[0], runners[0], runners[1]):
        with rows.building(runner):
            start_builder(monkeypatch, {"a": plan, "b": plan})
    first, second, other = (whole.of_run(0) for whole in made)
    assert first is not None
    assert second is not None
    assert other is not None
    assert first.scratch.data_ptr() == second.scratch.data_ptr() != other.scratch.data_ptr()
    assert first.arrived.data_ptr() != second.arrived.data_ptr()
    gone = weakref.ref(first.scratch)
    made.clear()
    del first, second
    gc.collect()
    assert gone() is None
