"""Reads the user's files: text, JSON and JSON lines."""

from __future__ import annotations

import codecs
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from vllm_sparse_plugin.errors import ConfigurationError

MOST_BYTES = 1 << 31
"""A larger file is refused, because it is held in memory."""
_UNREADABLE = (OSError, ValueError, RecursionError)
_PIECE = 1 << 24
"""Bytes per read. A file that is not text is refused after the first piece."""


def read_text(path: Path, option: str, allowed: str) -> str:
    """Return the text of a UTF-8 file without its byte order mark.

    Args:
        path: a file or a pipe.
        option: name of the option.
        allowed: description of a valid file.

    Raises:
        ConfigurationError: the file cannot be read, is too large or is not text; the message names `option`.
    """
    try:
        with path.open("rb") as file:
            return _decoded(iter(lambda: file.read(_PIECE), b""))
    except _UNREADABLE as error:
        raise _refusal(error, path, option, allowed) from None


def read_json(path: Path, option: str, allowed: str) -> Any:
    """Return the value of a JSON file. Arguments and errors: see `read_text`."""
    return parse_json(read_text(path, option, allowed), path, option, allowed)


def parse_json(text: str, path: Path, option: str, allowed: str, line: int | None = None) -> Any:
    """Return the value of a JSON text.

    Args:
        text: contents of the file.
        path: the file.
        option: name of the option.
        allowed: description of a valid file.
        line: number of the line, if the text is one line of the file.

    Raises:
        ConfigurationError: the text is not JSON, is nested too deeply or has half a character; names `option`.
    """
    try:
        return _value(text)
    except _UNREADABLE as error:
        raise _refusal(error, path, option, allowed, line) from None


def read_json_lines(path: Path, option: str) -> Iterator[tuple[int, str, Any]]:
    """Yield the number, text and value of each line that is not empty. The value is None if the line is not JSON.

    Raises:
        ConfigurationError: the file cannot be read or a line has half a character; the message names `option`.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), start=1):
                if line.strip():
                    yield number, line.rstrip("\r\n"), _value_of_line(number, line)
    except _UNREADABLE as error:
        raise _refusal(error, path, option, "a readable file") from None


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


class _SurrogateError(ValueError):
    pass


def _refusal(error: Exception, path: Path, option: str, allowed: str, line: int | None = None) -> ConfigurationError:
    reason = f"{error!s:.80}"
    if isinstance(error, OSError):
        reason = error.strerror or type(error).__name__
    elif isinstance(error, UnicodeDecodeError):
        reason = "no file of UTF-8 text"
    elif isinstance(error, RecursionError):
        reason = "nested too deeply"
    place = f"{str(path)!r}" if line is None else f"line {line} of {str(path)!r}"
    return ConfigurationError(f"{option}: got {place} ({reason}), allowed: {allowed}")


def _value_of_line(number: int, line: str) -> Any:
    try:
        return _value(line)
    except _SurrogateError as error:
        raise ValueError(f"line {number}: {error}") from None
    except (ValueError, RecursionError):
        return None


def _decoded(pieces: Iterator[bytes]) -> str:
    """Return the text of all pieces. Fail as early as possible."""
    decoder, texts, size = codecs.getincrementaldecoder("utf-8-sig")(), [], 0
    for piece in pieces:
        size += len(piece)
        if b"\0" in piece:
            raise ValueError("no file of UTF-8 text")
        if size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES >> 30} GiB")
        texts.append(decoder.decode(piece))
    texts.append(decoder.decode(b"", final=True))
    return "".join(texts)


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a file one by one."""
    first = True
    while begin := file.readline(_PIECE):

        def pieces(piece: bytes = begin) -> Iterator[bytes]:
            while piece:
                yield piece
                piece = b"" if piece.endswith(b"\n") else file.readline(_PIECE)

        line = _decoded(pieces())
        # Only the start of the file has a byte order mark. Elsewhere it is a character.
        yield line if first or not begin.startswith(codecs.BOM_UTF8) else f"\ufeff{line}"
        first = False


def _value(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or has half a character, which tokenizers refuse.
        RecursionError: the JSON is nested too deeply.
    """
    value = json.loads(text)
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _SurrogateError("a lone surrogate, which is half a character") from None
    return value


def try_lock(file: IO[Any]) -> bool:
    """Lock an open file until it is closed.

    File systems without locks, such as some network mounts, give no protection.

    Returns:
        False if another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
