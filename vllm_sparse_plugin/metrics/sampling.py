"""Chooses the steps of a running engine that are measured: the same steps on every worker of a model."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

_logger = logging.getLogger(f"vllm.{__name__}")
UNMEASURED = "a token cannot be measured"
"""Log message if a measurement fails."""
Lengths = Callable[[], Iterable[tuple[int, int]]]
"""Returns the numbers of query tokens and context tokens of each request of a step. The context includes the query."""


class Sample(NamedTuple):
    """Random numbers that choose what a step measures, to be taken modulo the number of choices."""

    token: int
    layers: int


class StepSampler:
    """Chooses the steps that are measured: after a fixed number of steps, the next suitable one.

    Workers of a model run the same steps. The choice depends only on the number of steps and on lengths. All workers
    therefore measure the same steps, and run them outside full CUDA graphs together.
    """

    sample: Sample | None = None
    """The sample of the current step; None if it is not measured."""

    def __init__(self, every: int, shortest: int = 1, longest_query: int = 1) -> None:
        """Takes the interval between measured steps (0 for none), the shortest context that is read sparsely, and the
        largest number of query tokens of a decoding request."""
        self.every = every
        self.shortest = shortest
        self.longest_query = longest_query
        self._steps = 0
        self._random = random.Random(0)

    def begin(self, lengths: Lengths | None) -> bool:
        """Runs before each step; returns whether the step is measured.

        Args:
            lengths: lengths of the step's requests; None for a step without requests.
        """
        self.sample = None
        if not self.every or lengths is None:
            return False
        self._steps += 1
        if self._steps < self.every:
            return False
        if not any(query <= self.longest_query and context >= self.shortest for query, context in lengths()):
            return False
        self._steps = 0
        self.sample = Sample(self._random.getrandbits(30), self._random.getrandbits(30))
        return True


_samplers: WeakKeyDictionary[Any, StepSampler] = WeakKeyDictionary()


def of_runner(runner: Any, sampler: StepSampler) -> StepSampler:
    """Returns the sampler of a model runner, shared by all groups of its layers. This is the given sampler if the
    runner has none yet, or if there is no runner, as in tests of a layer."""
    return sampler if runner is None else _samplers.setdefault(runner, sampler)


def begin_step(runner: Any, lengths: Lengths | None) -> bool:
    """Announces the next step to the sampler of a model runner; see `StepSampler.begin`."""
    sampler = _samplers.get(runner)
    # A failure here occurs on every worker, because all workers read the same numbers.
    with dropping(UNMEASURED):
        return sampler is not None and sampler.begin(lengths)
    return False


@contextmanager
def dropping(what: str, part: str = "metrics") -> Iterator[None]:
    """Suppresses exceptions, because metrics and warm-ups never stop an engine. For example, a long context may need
    more memory than vLLM leaves.

    Args:
        what: the log message, printed once.
        part: the part of the plugin, for the message.
    """
    try:
        yield
    except Exception as error:
        _say_once(part, what, error)


_reported: set[str] = set()


def _say_once(part: str, what: str, error: Exception) -> None:
    if what not in _reported:
        _reported.add(what)
        reason = f"{type(error).__name__}: {error}"
        _logger.warning("vllm_sparse_ %s of process %d: %s (%s)", part, os.getpid(), what, reason)
