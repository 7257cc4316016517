"""Logs for each finished request the share of its context that its tokens have read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

_logger = logging.getLogger(f"vllm.{__name__}")


class _Request:
    """Sums over the decoding tokens of a request and over the groups of layers with the same cache layout."""

    def __init__(self) -> None:
        self.steps = self.tokens_read = self.tokens_in_context = 0
        self.mass: torch.Tensor | None = None


class RequestLog:
    """Tokens read by the decoding tokens of each request until it ends. Preemption does not end a request."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}

    def add(self, names: Sequence[str | None], read: NDArray[np.int64], in_context: NDArray[np.int64]) -> None:
        """Adds a step.

        Args:
            names: requests of the rows, in order; None for rows without a request. Padding rows may be omitted.
            read: `[num_rows]`, tokens that a layer reads for each row, over all its query tokens; 0 for prompts.
            in_context: `[num_rows]`, tokens that dense attention would read.
        """
        for name, tokens_read, tokens in zip(names, read.tolist(), in_context.tolist(), strict=False):
            if name is not None and tokens:
                request = self._requests.setdefault(name, _Request())
                request.tokens_read += tokens_read
                request.tokens_in_context += tokens

    def masses(self, name: str, device: torch.device) -> torch.Tensor:
        """Returns the tensor that sums a request's estimated masses: `[2]` float32, sum and number."""
        request = self._requests.setdefault(name, _Request())
        if request.mass is None:
            request.mass = torch.zeros(2, device=device)
        return request.mass

    def finish(self, names: Iterable[str]) -> None:
        """Logs requests that have ended, and removes them. It waits for the device if some were measured."""
        for name in names:
            request = self._requests.pop(name, None)
            if request is None or not request.tokens_in_context:
                continue
            share = request.tokens_read / request.tokens_in_context
            sentence = f"request {name}: its decoding tokens read {share:.2%} of their contexts"
            if request.mass is not None:
                total, count = request.mass.tolist()
                if count:
                    sentence += f", estimated to carry {total / count:.2%} of the attention weight"
            _logger.info("%s", sentence)


_logs: WeakKeyDictionary[Any, RequestLog] = WeakKeyDictionary()


def of_runner(runner: Any) -> RequestLog:
    """Returns the log of a model runner, shared by all groups of layers."""
    return _logs.setdefault(runner, RequestLog())


def finish(runner: Any, names: Iterable[str]) -> None:
    """Tells the log of a model runner, if there is one, which requests have ended."""
    if (log := _logs.get(runner)) is not None:
        log.finish(names)
