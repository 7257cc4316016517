"""End of a command: one sentence on stderr and a documented exit code.

| code | meaning |
|---|---|
| 0 | done |
| 1 | a target is not met |
| 2 | bad input, or an output that cannot be written |
| 3 | a server or an engine failed, or memory ran out |
| 129, 130, 143 | ended by SIGHUP, Ctrl-C, SIGTERM |

If the reader of a pipe is gone, a command ends silently. Any other exception is a bug in the plugin and keeps its
traceback.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.extras import missing_package

BAD_INPUT, FAILED = 2, 3
_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
UNWRITABLE = {
    errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENOSPC, errno.EPERM, errno.EROFS,
}  # fmt: skip
"""Errors of a disk or its permissions."""
_WIDTH = 160
"""Columns of tables without a terminal."""
_handlers: dict[signal.Signals, Any] = {}
"""Signal handlers from before the command."""


def open_console() -> Console:
    """Return a console for a command's output. Tables have a fixed width without a terminal."""
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=_WIDTH)


def run(command: Callable[[], Any]) -> None:
    """Run a command line and end the process with a code of the table above.

    Args:
        command: a Typer application.
    """
    for stream in (sys.stdout, sys.stderr):
        # A file name may contain bytes that no encoding accepts.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    _catch_signals()
    try:
        code, sentence = _outcome(command)
    finally:
        leave_signals()
    if sentence:
        print(f"error: {' '.join(sentence.splitlines())}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay signals until the end of the block. Then deliver the last one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    kept = {number: handler for number, handler in previous.items() if handler not in (signal.SIG_IGN, None)}
    for number in kept:
        signal.signal(number, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[-1])


def _outcome(command: Callable[[], Any]) -> tuple[Any, str | None]:
    """Run a command. Return its exit code, and a sentence unless one was printed."""
    code: Any = 0
    try:
        try:
            command()
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()
    except ConfigurationError as error:
        return BAD_INPUT, str(error)
    except ModuleNotFoundError as error:
        if (sentence := missing_package(error.name or "")) is None:
            raise
        return BAD_INPUT, sentence
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _is_out_of_memory(error):
            raise
        return FAILED, f"memory ran out: {str(error) or 'no reason given'}"
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.filename is None:
            # Python would write the rest again at its exit, and print a traceback.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return code, None
        if error.errno not in UNWRITABLE:
            raise
        name = "stdout" if error.filename is None else repr(error.filename)
        return BAD_INPUT, f"{name}: got {error.strerror!r}, allowed: a place that can be written"
    return code, None


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch has too little memory, on a GPU or on a CPU."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def _catch_signals() -> None:
    """Let signals end the command like an exception, which ends its child processes."""
    _handlers.clear()
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        # Shells make background jobs ignore some signals, and so does `nohup`.
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            _handlers[number] = handler
            signal.signal(number, _interrupt)


def leave_signals() -> None:
    """Restore the signal handlers from before the command, for programs that handle signals."""
    for number, handler in _handlers.items():
        signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    print(f"{_SIGNALS[signal.Signals(number)]}: stopping", file=sys.stderr)
    sys.exit(128 + number)
