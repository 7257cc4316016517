"""What the plugin raises for bad input."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigurationError(RuntimeError):
    """A setting or a combination of settings that cannot be served.

    The message is one sentence that names the field, what was given and what is allowed. Not a ValueError: pydantic
    would bury a ValueError raised while vLLM validates its own configuration.
    """


def choices(names: Iterable[str]) -> str:
    """What is allowed, for the end of a sentence: `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
