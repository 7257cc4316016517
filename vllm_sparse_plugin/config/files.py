"""Reads settings from YAML within size limits. Refuses duplicate keys and unbounded aliases."""

from __future__ import annotations

import os
import stat
from typing import Any

import yaml

from vllm_sparse_plugin.errors import ConfigurationError

MOST_BYTES = 1 << 20
"""Largest size of a file."""
MOST_DEPTH = 16
"""Largest number of levels of nested mappings and lists."""
MOST_VALUES = 100_000
"""Largest number of keys and values, with aliases expanded. Thresholds by layer and KV head need the most."""


def read_text(field: str, path: Any) -> str:
    """Returns the text of a file of settings.

    Args:
        field: the setting that names the file, for messages.
        path: the path of the file.

    Raises:
        ConfigurationError: if it cannot be read, is not UTF-8 text, or is too large.
    """
    if not isinstance(path, str):
        raise ConfigurationError(f"{field}: got {path!r}, allowed: the path of a YAML file")
    try:
        # Opening a named pipe would wait for another process.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(MOST_BYTES + 1) if is_regular else b""
        if is_regular and len(data) <= MOST_BYTES:
            return data.decode("utf-8")
        reason = f"more than {MOST_BYTES >> 20} MiB" if is_regular else "no regular file"
    except OSError as error:
        reason = str(error.strerror)
    except ValueError:
        reason = "no file of UTF-8 text"
    raise ConfigurationError(f"{field}: got {path!r} ({reason}), allowed: a readable YAML file")


def parse(origin: str, text: str) -> dict[str, Any]:
    """Returns the mapping in a YAML text.

    Args:
        origin: the source of the text, for messages.
        text: the text; empty for an empty mapping.

    Raises:
        ConfigurationError: if it is not YAML or not a mapping, has a duplicate key, or is too large or too deep.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        _Bounds(origin).check(node)
        values = loader.construct_document(node)
    except (yaml.YAMLError, LookupError, ValueError) as error:  # PyYAML raises ValueError for impossible dates
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigurationError(f"{origin}: got text that is not YAML{where}, allowed: a YAML mapping") from None
    except RecursionError:
        raise _too_deep(origin) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigurationError(f"{origin}: got a {type(values).__name__}, allowed: a YAML mapping")
    return values


class _Bounds:
    """Checks the nodes of a text before values are constructed."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._sizes: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()

    def check(self, node: yaml.Node) -> None:
        """Checks a text, given its outermost node.

        Raises:
            ConfigurationError: see `parse`.
        """
        values, depth = self._measure(node)
        origin = self._origin
        if depth > MOST_DEPTH:
            raise _too_deep(origin)
        if values > MOST_VALUES:
            raise ConfigurationError(f"{origin}: got more than {MOST_VALUES:,} values, allowed: up to {MOST_VALUES:,}")

    def _measure(self, node: yaml.Node) -> tuple[int, int]:
        """Returns the number of keys and values with aliases expanded, and the number of levels."""
        if isinstance(node, yaml.ScalarNode):
            return 1, 0
        known = self._sizes.get(id(node))
        if known is not None:
            return known
        if id(node) in self._open:
            origin = self._origin
            raise ConfigurationError(f"{origin}: got settings that contain themselves, allowed: a finite mapping")
        self._open.add(id(node))
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            self._expect_each_key_once(node)
            parts = [part for pair in node.value for part in pair]
        inner = [self._measure(part) for part in parts]
        self._open.remove(id(node))
        size = 1 + sum(values for values, _ in inner), 1 + max((depth for _, depth in inner), default=0)
        self._sizes[id(node)] = size
        return size

    def _expect_each_key_once(self, node: yaml.MappingNode) -> None:
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in keys:
                line = key.start_mark.line + 1
                got, origin = f"the key {key.value!r:.80} a second time at line {line}", self._origin
                raise ConfigurationError(f"{origin}: got {got}, allowed: each key once")
            keys.add((key.tag, key.value))


def _too_deep(origin: str) -> ConfigurationError:
    return ConfigurationError(f"{origin}: got more than {MOST_DEPTH} nested levels, allowed: up to {MOST_DEPTH}")
