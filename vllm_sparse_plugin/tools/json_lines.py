"""Reads the files of JSON lines that users give to commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_sparse_plugin.errors import ConfigurationError


def read_json_lines(path: Path, option: str) -> Iterator[tuple[int, str, Any]]:
    """Yields the number, the text and the value of each line that is not empty; None for the value of what is no JSON.

    Raises:
        ConfigurationError: names `option` if the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no file of UTF-8 text"
        raise ConfigurationError(f"{option}: got {str(path)!r} ({reason}), allowed: a readable file") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            yield number, line, entry
