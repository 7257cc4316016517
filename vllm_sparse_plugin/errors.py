"""The exception for bad input."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigurationError(RuntimeError):
    """A setting or a combination of settings that is not supported.

    The message is one sentence with the field, the value and the allowed values. The class does not derive from
    ValueError, because pydantic would wrap that in its own report.
    """


def choices(names: Iterable[str]) -> str:
    """Lists the allowed values for a sentence: `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
