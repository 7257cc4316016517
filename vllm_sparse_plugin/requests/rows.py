"""Finds out which request each row of a batch belongs to, and how long its prompt is.

vLLM's metadata of a step does not say it, but its model runners know, each in its own way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_sparse_plugin.errors import ConfigurationError


class Row(NamedTuple):
    """A row of a batch."""

    request_id: str
    prompt_tokens: int


class BatchRows:
    """The requests of the batches of one model runner."""

    def __init__(self, runner: Any) -> None:
        """Takes a runner of vLLM's, which outlives the layers' metadata builders."""
        if not hasattr(runner, "req_states") and not hasattr(runner, "input_batch"):
            raise _unknown(type(runner).__name__)
        self._runner = ref(runner)

    def of(self, common: CommonAttentionMetadata) -> list[Row | None]:
        """Returns the rows of a step, in order; None for those that no request has, as in a dummy run. Rows that pad a
        batch may be left out."""
        runner = self._runner()
        if runner is None:
            return []
        if hasattr(runner, "req_states"):
            states, index = runner.req_states, common.req_idx
            if index is None:
                return []
            ids = [states.index_to_req_id.get(int(request)) for request in index]
            lengths = states.prompt_len.np[index].tolist()
        else:
            batch = runner.input_batch
            ids = list(batch.req_ids[: batch.num_reqs])
            lengths = batch.num_prompt_tokens[: batch.num_reqs].tolist()
        return [None if name is None else Row(name, length) for name, length in zip(ids, lengths, strict=True)]

    def arguments(self, common: CommonAttentionMetadata) -> list[Mapping[str, Any]]:
        """Returns what each request of a step's batch has in `extra_args`, in order; nothing for rows that no request
        has, as in a dummy run. Rows that pad a batch may be left out."""
        runner = self._runner()
        if runner is None:
            return []
        if hasattr(runner, "req_states"):
            noted, index = _noted.get(runner), common.req_idx
            if not noted or index is None:
                return []
            names = runner.req_states.index_to_req_id
            return [noted.get(names.get(int(request)), {}) for request in index]
        batch = runner.input_batch
        sampling = (runner.requests[name].sampling_params for name in batch.req_ids[: batch.num_reqs])
        return [{} if params is None else params.extra_args or {} for params in sampling]

    def knows(self, request_id: str) -> bool:
        """Returns whether the runner still has a request, though it may be in no step."""
        runner = self._runner()
        if runner is None:
            return False
        if hasattr(runner, "req_states"):
            return request_id in runner.req_states.req_id_to_index
        return request_id in runner.requests


_building: ContextVar[BatchRows | None] = ContextVar("building", default=None)
"""The rows of the model runner that is building its metadata builders."""
_noted: WeakKeyDictionary[Any, dict[str | None, Mapping[str, Any]]] = WeakKeyDictionary()
"""Of each of the newer model runners, the `extra_args` of the requests that have some."""


def note(runner: Any, new: Iterable[Any]) -> None:
    """Remembers what new requests of the newer model runner have in `extra_args`; of those that have gone, nothing.

    Args:
        runner: the model runner, which has taken them.
        new: the requests, each with `req_id` and `sampling_params`; one that was preempted is new again.
    """
    noted = _noted.setdefault(runner, {})
    for request in new:
        parameters = request.sampling_params
        noted.pop(request.req_id, None)
        if parameters is not None and parameters.extra_args:
            noted[request.req_id] = parameters.extra_args
    for name in [name for name in noted if name not in runner.req_states.req_id_to_index]:
        del noted[name]


@contextmanager
def building(runner: Any) -> Iterator[None]:
    """Names the model runner that builds metadata builders within the context.

    Raises:
        ConfigurationError: for a runner of another kind than those of vLLM 0.32 and 0.33.
    """
    token = _building.set(BatchRows(runner))
    try:
        yield
    finally:
        _building.reset(token)


def current_if_any() -> BatchRows | None:
    """Returns the rows of the model runner that builds metadata builders; None outside `building`, which happens only
    in tests and benchmarks."""
    return _building.get()


def loading_runner() -> Any | None:
    """Returns the model runner that builds metadata builders; None outside `building`."""
    rows = _building.get()
    return None if rows is None else rows._runner()


def current() -> BatchRows:
    """Returns the rows of the model runner that builds metadata builders.

    Raises:
        ConfigurationError: outside `building`.
    """
    rows = _building.get()
    if rows is None:
        raise _unknown("an unknown one")
    return rows


def _unknown(runner: str) -> ConfigurationError:
    return ConfigurationError(f"vLLM's model runner: got {runner}, allowed: those of vLLM 0.32 and 0.33")
