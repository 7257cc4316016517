"""Reads the user's files: text and JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_sparse_plugin.errors import ConfigurationError

MOST_BYTES = 1 << 31
"""A larger file is refused, because it is held in memory."""


def read_text(path: Path, option: str, allowed: str) -> str:
    """Return the text of a UTF-8 file without its byte order mark.

    Args:
        path: a file or a pipe.
        option: name of the option.
        allowed: description of a valid file.

    Raises:
        ConfigurationError: the file cannot be read, is too large or is not text; the message names `option`.
    """
    reason = "no file of UTF-8 text"
    try:
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            reason = f"more than {MOST_BYTES >> 30} GiB"
        elif not path.is_char_device():  # such as /dev/zero, which never ends
            return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or type(error).__name__
    except ValueError:
        pass
    raise ConfigurationError(f"{option}: got {str(path)!r} ({reason}), allowed: {allowed}")


def read_json_lines(path: Path, option: str) -> Iterator[tuple[int, str, Any]]:
    """Yield the number, text and value of each line that is not empty.

    The value is None if the line is not JSON, or has half a character, which tokenizers refuse.

    Raises:
        ConfigurationError: the file cannot be read; the message names `option`.
    """
    for number, line in enumerate(read_text(path, option, "a readable file").split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r"), _value(line)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(path: Path) -> str:
    """Return 16 hexadecimal digits that identify the contents of a file.

    Raises:
        OSError: the file cannot be read.
    """
    return sha256_of(path)[:16]


def can_be_made(folder: Path) -> bool:
    """Return whether files can be created in a folder, or the folder itself in its nearest existing parent."""
    nearest = next((each for each in (folder.absolute(), *folder.absolute().parents) if each.exists()), folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _value(line: str) -> Any:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value
