"""The exception for bad input."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class ConfigurationError(RuntimeError):
    """A setting or a combination of settings that is not supported.

    The message is one sentence with the field, the value and the allowed values. The class does not derive from
    ValueError, because pydantic would wrap that in its own report.
    """


def expect_known(field: str, names: Iterable[str], known: Collection[str]) -> None:
    """Check names of a field.

    Raises:
        ConfigurationError: for the first name that is not in `known`.
    """
    for name in names:
        if name not in known:
            raise ConfigurationError(f"{field}: got {name!r}, allowed: {choices(known)}")


def choices(names: Iterable[str]) -> str:
    """Lists the allowed values for a sentence: `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def printable(text: str, most: int = 80) -> str:
    """Returns a client's text for a message or the log: cut to so many characters, control characters escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text[:most])
