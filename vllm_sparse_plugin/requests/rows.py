"""Finds the request of each row of a batch, and the length of its prompt.

vLLM's metadata of a step has neither. Its two model runners store them in different ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_plugin import compat
from vllm_sparse_plugin.errors import ConfigurationError


class Row(NamedTuple):
    """A row of a batch."""

    request_id: str
    prompt_tokens: int


class BatchRows:
    """The requests in the batches of one model runner."""

    def __init__(self, runner: Any) -> None:
        """Takes vLLM's model runner, which outlives the metadata builders of the layers."""
        if not hasattr(runner, "req_states") and not hasattr(runner, "input_batch"):
            raise _unknown(type(runner).__name__)
        self._runner = ref(runner)

    def of(self, common: CommonAttentionMetadata) -> list[Row | None]:
        """Returns the rows of a step, in order; None for a row without a request. Padding rows may be missing, and so
        are those of a dummy run."""
        runner = self._runner()
        if runner is None or compat.is_dummy_run(runner):
            return []
        if hasattr(runner, "req_states"):
            states, index = runner.req_states, _numbers_of(runner, common)
            if index is None:
                return []
            ids = [states.index_to_req_id.get(int(request)) for request in index]
            lengths = states.prompt_len.np[index].tolist()
        else:
            batch = runner.input_batch
            ids = list(batch.req_ids[: batch.num_reqs])
            lengths = batch.num_prompt_tokens[: batch.num_reqs].tolist()
        return [None if name is None else Row(name, length) for name, length in zip(ids, lengths, strict=True)]

    def of_step(self, common: CommonAttentionMetadata) -> list[Row | None]:
        """Returns the same for a caller that must know each request.

        Raises:
            RuntimeError: the step does not name its requests. The scheduler frees their blocks, so the worker would
                read blocks of others.
        """
        runner = self._runner()
        if hasattr(runner, "req_states") and _numbers_of(runner, common) is None:
            raise RuntimeError("a step of vLLM's model runner does not name its requests")
        return self.of(common)

    def arguments(self, common: CommonAttentionMetadata) -> list[Mapping[str, Any]]:
        """Returns `extra_args` of each request of a step, in order; an empty mapping for a row without a request.
        Padding rows may be missing, and so are those of a dummy run."""
        runner = self._runner()
        if runner is None or compat.is_dummy_run(runner):
            return []
        if hasattr(runner, "req_states"):
            index = _numbers_of(runner, common)
            if not _noted.get(runner) or index is None:
                return []
            names = runner.req_states.index_to_req_id
            return [self.arguments_of(names.get(int(request))) for request in index]
        batch = runner.input_batch
        return [self.arguments_of(name) for name in batch.req_ids[: batch.num_reqs]]

    def arguments_of(self, request_id: str | None) -> Mapping[str, Any]:
        """Returns `extra_args` of a request; an empty mapping for a row without a request."""
        runner = self._runner()
        if runner is None or request_id is None:
            return {}
        if hasattr(runner, "req_states"):
            return _noted.get(runner, {}).get(request_id, {})
        parameters = runner.requests[request_id].sampling_params
        return {} if parameters is None else parameters.extra_args or {}

    def knows(self, request_id: str) -> bool:
        """Returns whether the runner still has a request, scheduled or not."""
        runner = self._runner()
        if runner is None:
            return False
        if hasattr(runner, "req_states"):
            return request_id in runner.req_states.req_id_to_index
        return request_id in runner.requests

    def runs(self, request_id: str) -> bool:
        """Returns whether a request has ended neither in full nor by a preemption. It may wait in this step."""
        return self.knows(request_id) and request_id not in _preempted.get(self._runner(), ())


def _numbers_of(runner: Any, common: CommonAttentionMetadata) -> Any:
    """Returns the numbers of a step's requests in the newer model runner, in order; None for a batch of drafts."""
    batch = compat.batch_of_step(runner) if common.req_idx is None else None
    return common.req_idx if batch is None else batch.idx_mapping_np


def prompts_of(rows: BatchRows | None, common: CommonAttentionMetadata) -> torch.Tensor | None:
    """Returns which requests of a step compute their prompts, `[num_reqs]` bool; None if vLLM does not tell.

    For models with state-space layers, the newer runner's metadata leaves out prompts of which a step computes one
    token: their state-space layers decode it.

    Args:
        rows: the requests of the batches; None without a runner.
        common: the step. Padding rows may be missing from the result.
    """
    runner = None if rows is None else rows._runner()
    batch = None if runner is None else compat.batch_of_step(runner)
    return common.is_prefilling if batch is None else torch.from_numpy(batch.is_prefilling_np)


_building: ContextVar[BatchRows | None] = ContextVar("building", default=None)
"""The rows of the model runner that is creating its metadata builders."""
_noted: WeakKeyDictionary[Any, dict[str, Mapping[str, Any]]] = WeakKeyDictionary()
"""`extra_args` by request, for each of the newer model runners. Only requests with `extra_args` are listed."""
_preempted: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Requests that were preempted and have not been resumed, for each model runner."""


def note(runner: Any, new: Iterable[Any]) -> None:
    """Stores `extra_args` of new requests of the newer model runner, and forgets requests that have ended.

    Args:
        runner: the model runner, which has already added them.
        new: the requests, each with `req_id` and `sampling_params`. A preempted request is new again.
    """
    noted = _noted.setdefault(runner, {})
    for request in new:
        parameters = request.sampling_params
        noted.pop(request.req_id, None)
        if parameters is not None and parameters.extra_args:
            noted[request.req_id] = parameters.extra_args
    for name in [name for name in noted if name not in runner.req_states.req_id_to_index]:
        del noted[name]


def preempt(runner: Any, names: Iterable[str], scheduled: Iterable[str]) -> None:
    """Notes the requests that were preempted. The first model runner keeps them as if they waited for a step.

    Args:
        runner: the model runner.
        names: of the requests that were preempted before the next step.
        scheduled: names of the requests in that step.
    """
    known, rows = _preempted.setdefault(runner, set()), BatchRows(runner)
    known.update(names)
    known.difference_update(scheduled, [name for name in known if not rows.knows(name)])


@contextmanager
def building(runner: Any) -> Iterator[None]:
    """Sets the model runner that creates metadata builders within the context.

    Raises:
        ConfigurationError: for a runner that is not one of vLLM 0.32 and 0.33.
    """
    token = _building.set(BatchRows(runner))
    try:
        yield
    finally:
        _building.reset(token)


def current_if_any() -> BatchRows | None:
    """Returns the rows of the model runner that creates metadata builders.

    None outside `building`, which happens only in tests and benchmarks.
    """
    return _building.get()


def loading_runner() -> Any | None:
    """Returns the model runner that creates metadata builders; None outside `building`."""
    rows = _building.get()
    return None if rows is None else rows._runner()


def current() -> BatchRows:
    """Returns the rows of the model runner that creates metadata builders.

    Raises:
        ConfigurationError: outside `building`.
    """
    rows = _building.get()
    if rows is None:
        raise _unknown("an unknown one")
    return rows


def _unknown(runner: str) -> ConfigurationError:
    return ConfigurationError(f"vLLM's model runner: got {runner}, allowed: those of vLLM 0.32 and 0.33")
