"""Suppresses failures that must not stop an engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

_logger = logging.getLogger(f"vllm.{__name__}")
_reported: set[str] = set()


@contextmanager
def dropping(what: str, part: str = "metrics") -> Iterator[None]:
    """Suppresses exceptions, because metrics and warm-ups never stop an engine. For example, a disk may be full.

    Args:
        what: the log message, printed once.
        part: the part of the plugin, for the message.
    """
    try:
        yield
    except Exception as error:
        _say_once(part, what, error)


def _say_once(part: str, what: str, error: Exception) -> None:
    if what not in _reported:
        _reported.add(what)
        reason = f"{type(error).__name__}: {error}"
        _logger.warning("vllm_sparse_ %s of process %d: %s (%s)", part, os.getpid(), what, reason)
