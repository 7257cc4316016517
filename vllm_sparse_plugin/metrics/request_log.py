"""Logs for each finished request the share of its context that its tokens have read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from vllm_sparse_plugin.errors import printable

_logger = logging.getLogger(f"vllm.{__name__}")
_MOST_SHOWN = 256
"""Characters of a request's name, which a client may choose."""


class _Request:
    """Sums over the decoding tokens of a request and over the groups of layers with the same cache layout."""

    def __init__(self) -> None:
        self.tokens_read = self.tokens_in_context = 0


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

    def finish(self, names: Iterable[str]) -> None:
        """Logs requests that have ended, and removes them."""
        for name in names:
            request = self._requests.pop(name, None)
            if request is not None and request.tokens_in_context:
                share = request.tokens_read / request.tokens_in_context
                shown = printable(name, _MOST_SHOWN)
                _logger.info("request %s: its decoding tokens read %.2f%% of their contexts", shown, 100 * share)


_logs: WeakKeyDictionary[Any, RequestLog] = WeakKeyDictionary()


def of_runner(runner: Any) -> RequestLog:
    """Returns the log of a model runner, shared by all groups of layers."""
    return _logs.setdefault(runner, RequestLog())


def finish(runner: Any, names: Iterable[str]) -> None:
    """Tells the log of a model runner, if there is one, which requests have ended."""
    if (log := _logs.get(runner)) is not None:
        log.finish(names)
