"""How a command ends: one sentence on stderr and a documented exit code.

| code | meaning |
|---|---|
| 0 | done |
| 1 | a target is not met |
| 2 | bad input, or an output that cannot be written |
| 3 | a server or an engine failed, or memory ran out |
| 129, 130, 143 | ended by SIGHUP, Ctrl-C, SIGTERM |
| 141 | the reader of a pipe is gone |

Any other exception is a fault of the plugin and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from rich.console import Console

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.extras import missing_package

BAD_INPUT, FAILED = 2, 3
_CLOSED_PIPE = 128 + signal.SIGPIPE
_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
_REPEAT_SECONDS = 1.0
"""A signal that comes so soon after another one does not interrupt what the first one has started."""
UNWRITABLE = {
    errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENOSPC, errno.EPERM, errno.EROFS,
}  # fmt: skip
"""Errors of a disk or of its permissions."""
_WIDTH = 160
"""Columns of tables where there is no terminal."""
_handlers: dict[signal.Signals, Any] = {}
"""What handled signals before the command began."""
_signals: list[float] = []
"""When signals came since the command began, by `time.monotonic`."""


class ClosedPipeError(RuntimeError):
    """The reader of stdout is gone. Not an OSError: Typer ends a command without a word at that."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, where rich would end the process without a word."""
        raise ClosedPipeError


def open_console() -> Console:
    """Return a console for a command's output; tables keep their width where there is no terminal."""
    console = _Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return _Console(width=_WIDTH)


def run(command: Callable[[], Any]) -> None:
    """Run a command line and end the process, see the table above.

    Args:
        command: a Typer application.
    """
    for stream in (sys.stdout, sys.stderr):
        # A name of a file may hold bytes that no encoding has.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    with _ending_signals():
        code, sentence = _outcome(command)
    # `python -m` forgets the exit code and dies by SIGINT if Ctrl-C came while a text was executed, as dataclasses do
    # when they are imported. Python takes that back when it executes the next text.
    exec("pass")
    if sentence:
        print(f"error: {' '.join(sentence.splitlines())}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def explain_pipes() -> Iterator[None]:
    """Turn the error of a closed pipe into one that reaches `run`."""
    try:
        yield
    except BrokenPipeError:
        raise ClosedPipeError from None


@contextmanager
def undisturbed() -> Iterator[Callable[[], bool]]:
    """Hold signals back until the end of the block, and deliver the last of them there.

    Yields:
        Says whether two signals or more have come since the command began: then the user does not want to wait.
    """
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, _frame: FrameType | None) -> None:
        _signals.append(time.monotonic())
        arrived.append(number)

    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    kept = {number: handler for number, handler in previous.items() if handler not in (signal.SIG_IGN, None)}
    for number in kept:
        signal.signal(number, note)
    try:
        yield lambda: len(_signals) > 1
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        if arrived:
            _signals.pop()  # the handler counts it
            signal.raise_signal(arrived[-1])


def _outcome(command: Callable[[], Any]) -> tuple[Any, str | None]:
    """Run a command; return the exit code and a sentence if nothing was said yet."""
    code: Any = 0
    try:
        try:
            command()
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()
    except KeyboardInterrupt:  # without Typer, which turns it into an exit
        return 128 + signal.SIGINT, None  # the handler has said it
    except ConfigurationError as error:
        return BAD_INPUT, str(error)
    except ModuleNotFoundError as error:
        if (sentence := missing_package(error.name or "")) is None:
            raise
        return BAD_INPUT, sentence
    except (ClosedPipeError, BrokenPipeError):
        _drop_stdout()
        return _CLOSED_PIPE, "stdout: got a closed pipe, allowed: a reader that takes all of it"
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _is_out_of_memory(error):
            raise
        return FAILED, f"memory ran out: {str(error) or 'no reason given'}"
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        return BAD_INPUT, _about_full_disk(error)
    return code, None


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch has too little memory, on a GPU or on a CPU."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def _about_full_disk(error: OSError) -> str:
    name = "output" if error.filename is None else repr(error.filename)
    try:
        if error.filename is None and not sys.stdout.isatty():
            # An error of writing does not say where. What did not fit is lost, so an empty line does no harm.
            os.write(sys.stdout.fileno(), b"\n")
    except (OSError, ValueError):
        name = "stdout"
        _drop_stdout()
    return f"{name}: got {error.strerror!r}, allowed: a place that can be written"


def _drop_stdout() -> None:
    """Throw away what stdout still holds: Python would try to write it once more, and print a traceback."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextmanager
def _ending_signals() -> Iterator[None]:
    """Let signals end the command like an exception, so that nothing it started outlives it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _signals.clear()
    _handlers.update({number: signal.getsignal(number) for number in _SIGNALS})
    for number, handler in _handlers.items():
        # A shell lets jobs in the background, and `nohup`, ignore some of them.
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        if _signals:
            # Nothing is left to stop, and one more would end the interpreter in the middle of its own end.
            for number in _handlers:
                signal.signal(number, signal.SIG_IGN)
        else:
            leave_signals()


def leave_signals() -> None:
    """Give signals back to what handled them before the command began; for programs that handle them by themselves."""
    for number, handler in _handlers.items():
        if handler is not None:
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    now = time.monotonic()
    _signals.append(now)
    if len(_signals) > 1 and now - _signals[-2] < _REPEAT_SECONDS:
        return
    with suppress(RuntimeError, OSError, ValueError):  # stderr may be in use, closed or gone
        print(f"{_SIGNALS[signal.Signals(number)]}: stopping; once more kills what still runs", file=sys.stderr)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
