"""The result file of `--json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from vllm_sparse_plugin.errors import ConfigurationError


class Report:
    """A JSON lines file. It replaces the file of an earlier run when its first row is written."""

    def __init__(self, path: Path | None, option: str, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Check that the file can be written.

        Args:
            path: of the file; None to write nothing.
            option: name of the option.
            describe: returns the first line, a description of the run. Called when the file is known to be writable.

        Raises:
            ConfigurationError: the file cannot be written; the message names `option`.
        """
        self._path, self._option = path, option
        self._about: Mapping[str, Any] = {}
        self._file: IO[str] | None = None
        self._error: OSError | None = None
        if path is None:
            return
        is_special = False
        try:
            is_special = path.exists() and not path.is_file()
            if not is_special:
                is_new = not path.exists()
                path.open("a", encoding="utf-8").close()
                if is_new:
                    path.unlink()
        except OSError as error:
            self._error = error
        self.check()
        self._about = describe()
        if is_special:
            # A device or pipe loses nothing, and shows with this line whether it is writable.
            self._begin()
            self.check()

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row. The first error ends the writing, not the run, see `check`."""
        if self._path is None or self._error is not None:
            return
        if self._file is None:
            self._begin()
        self._write(row)

    def check(self) -> None:
        """Check that everything was written.

        Raises:
            ConfigurationError: a row was not written.
        """
        if self._error is not None:
            raise ConfigurationError(
                f"{self._option}: got {str(self._path)!r} ({self._error.strerror}), allowed: a file that can be written"
            )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._error = self._error or error

    def _begin(self) -> None:
        assert self._path is not None
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            self._error = error
        self._write(self._about)

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._file is None or self._error is not None:
            return
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            self._error = error
