"""Reads the files of text, JSON and JSON lines that users give to commands."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from vllm_sparse_plugin.errors import ConfigurationError

MOST_BYTES = 1 << 31
"""A larger file is refused: all of it is held in memory."""
_UNREADABLE = (OSError, ValueError, RecursionError)
_PIECE = 1 << 24
"""Bytes that are read at a time. What is no text shows in the first piece, however large the file is."""


def read_text(path: Path, option: str, allowed: str) -> str:
    """Return the text of a file of UTF-8, without its byte order mark.

    Args:
        path: a file or a pipe.
        option: what the user calls it.
        allowed: what it should be.

    Raises:
        ConfigurationError: names `option` if it cannot be read, is too large or is no text.
    """
    try:
        with path.open("rb") as file:
            return _decoded(iter(lambda: file.read(_PIECE), b""))
    except _UNREADABLE as error:
        raise _refusal(error, path, option, allowed) from None


def read_json(path: Path, option: str, allowed: str) -> Any:
    """Return the value of a file of JSON; arguments and errors as of `read_text`."""
    return parse_json(read_text(path, option, allowed), path, option, allowed)


def parse_json(text: str, path: Path, option: str, allowed: str, line: int | None = None) -> Any:
    """Return the value of a text of JSON.

    Args:
        text: of the file.
        path: where it comes from.
        option: what the user calls the file.
        allowed: what it should be.
        line: number of the only line that the text is.

    Raises:
        ConfigurationError: names `option` if it is no JSON, is nested too deeply or has half a character.
    """
    try:
        return _value(text)
    except _UNREADABLE as error:
        raise _refusal(error, path, option, allowed, line) from None


def read_json_lines(path: Path, option: str) -> Iterator[tuple[int, str, Any]]:
    """Yield the number, the text and the value of each line that is not empty; None for the value of what is no JSON.

    Raises:
        ConfigurationError: names `option` if the file cannot be read or a line has half a character.
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
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(path: Path) -> str:
    """Return sixteen hexadecimal digits that differ where files do.

    Raises:
        OSError: if it cannot be read.
    """
    return sha256_of(path)[:16]


def can_be_made(folder: Path) -> bool:
    """Return whether files can be made in a folder, or the folder itself in the nearest one that is there."""
    there = next((each for each in (folder.absolute(), *folder.absolute().parents) if each.exists()), folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


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
    """Return the text of all pieces, as soon as possible an error."""
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
        # Only the file has a byte order mark. Elsewhere it is a character.
        yield line if first or not begin.startswith(codecs.BOM_UTF8) else f"\ufeff{line}"
        first = False


def _value(text: str) -> Any:
    """Return the value of JSON.

    Raises:
        ValueError: for any other text, and for half a character, which no tokenizer takes.
        RecursionError: if it is nested too deeply.
    """
    value = json.loads(text)
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _SurrogateError("a lone surrogate, which is half a character") from None
    return value
