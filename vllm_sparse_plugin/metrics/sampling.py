"""Says which steps of a running engine are measured, the same on every worker of a model."""

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
"""What the log says where measuring fails."""
Lengths = Callable[[], Iterable[tuple[int, int]]]
"""Gives query tokens and context, those tokens included, of each request of a step."""


class Sample(NamedTuple):
    """What of a step is measured: numbers at random, to be taken modulo what there is to choose from."""

    token: int
    layers: int


class StepSampler:
    """Picks steps to be measured: one, and then the next one that fits when so many have gone by.

    Workers of a model run the same steps, and nothing but their number and their lengths decides here. So all of them
    measure in the same steps, which run outside full CUDA graphs together.
    """

    sample: Sample | None = None
    """What is measured of the step that runs; None for nothing."""

    def __init__(self, every: int, shortest: int = 1, longest_query: int = 1) -> None:
        """Takes steps between two that are measured, 0 for none; the shortest context that leaves something out; and
        most query tokens of a request that decodes."""
        self.every = every
        self.shortest = shortest
        self.longest_query = longest_query
        self._steps = 0
        self._random = random.Random(0)

    def begin(self, lengths: Lengths | None) -> bool:
        """Is called before each step; returns whether it is measured.

        Args:
            lengths: of the step's requests; None for a step that no request is in.
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
    """Returns the sampler of a model runner, which all groups of its layers share: the one given, if it has none yet,
    or if there is no runner, as in tests of a layer."""
    return sampler if runner is None else _samplers.setdefault(runner, sampler)


def begin_step(runner: Any, lengths: Lengths | None) -> bool:
    """Tells the sampler of a model runner of its next step; see `StepSampler.begin`."""
    sampler = _samplers.get(runner)
    # What fails here fails on every worker: it is the same numbers that all of them read.
    with dropping(UNMEASURED):
        return sampler is not None and sampler.begin(lengths)
    return False


@contextmanager
def dropping(what: str, part: str = "metrics") -> Iterator[None]:
    """Drops what fails within, since metrics and warm-ups never end an engine: a long context may not fit the memory
    that vLLM leaves.

    Args:
        what: what the log then says, once.
        part: what of us it says it of.
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
