"""End of a command: one sentence on stderr and a documented exit code.

| code | meaning |
|---|---|
| 0 | done |
| 1 | a target is not met |
| 2 | bad input, or an output that cannot be written |
| 3 | a server or an engine failed, or memory ran out |
| 129, 130, 143 | ended by SIGHUP, Ctrl-C, SIGTERM |
| 141 | the reader of a pipe is gone |

Any other exception is a bug in the plugin and keeps its traceback.
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
from typing import Any, NoReturn, TextIO

from rich.console import Console

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.extras import missing_package

BAD_INPUT, FAILED = 2, 3
_CLOSED_PIPE = 128 + signal.SIGPIPE
_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
_REPEAT_SECONDS = 1.0
"""A signal within this time of another does not interrupt what that one started."""
UNWRITABLE = {
    errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENOSPC, errno.EPERM, errno.EROFS,
}  # fmt: skip
"""Errors of a disk or its permissions."""
_WIDTH = 160
"""Columns of tables without a terminal."""
_handlers: dict[signal.Signals, Any] = {}
"""Signal handlers from before the command."""
_signals: list[float] = []
"""Times of signals since the command began, by `time.monotonic`."""


class ClosedPipeError(RuntimeError):
    """The reader of stdout is gone. Not an OSError, because Typer ends a command silently for one."""


def _refuse_closed_pipe(_console: Console) -> NoReturn:
    """Raise an error. rich would end the process silently, also while Typer prints a help text."""
    raise ClosedPipeError


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
    setattr(Console, "on_broken_pipe", _refuse_closed_pipe)  # noqa: B010
    with _ending_signals():
        code, sentence = _outcome(command)
    # If Ctrl-C came while Python executed a text (dataclasses do that on import), `python -m` ignores the exit code and
    # dies by SIGINT. Executing another text resets that.
    exec("pass")
    if sentence:
        _complain(f"error: {' '.join(sentence.splitlines())}")
    sys.exit(code)


@contextmanager
def explain_pipes() -> Iterator[None]:
    """Turn the error of a closed pipe into an error that reaches `run`."""
    try:
        yield
    except BrokenPipeError:
        raise ClosedPipeError from None


@contextmanager
def undisturbed() -> Iterator[Callable[[], bool]]:
    """Delay signals until the end of the block. Then deliver the last one.

    Yields:
        A function that returns whether two or more signals came since the command began: the user does not want to
        wait.
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
    """Run a command. Return its exit code, and a sentence unless one was printed."""
    code: Any = 0
    try:
        try:
            command()
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()
    except KeyboardInterrupt:  # without Typer, which turns it into an exit
        return 128 + signal.SIGINT, None  # the handler printed the sentence
    except ConfigurationError as error:
        return BAD_INPUT, str(error)
    except ModuleNotFoundError as error:
        if (sentence := missing_package(error.name or "")) is None:
            raise
        return BAD_INPUT, sentence
    except (ClosedPipeError, BrokenPipeError):
        _drop(sys.stdout)
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
            # A write error does not name its place. A partial row is lost, so an empty line does no harm.
            os.write(sys.stdout.fileno(), b"\n")
    except (OSError, ValueError):
        name = "stdout"
        _drop(sys.stdout)
    return f"{name}: got {error.strerror!r}, allowed: a place that can be written"


def _complain(sentence: str) -> None:
    """Print a sentence on stderr. The exit code must not depend on whether anybody can read it."""
    try:
        if sys.stderr is not None:
            print(sentence, file=sys.stderr, flush=True)
    except RuntimeError:
        pass  # a signal came while stderr was written
    except (OSError, ValueError):
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Discard the buffer of a standard stream. Python would write it again at its exit, and change the exit code."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextmanager
def _ending_signals() -> Iterator[None]:
    """Let signals end the command like an exception, which ends its child processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _signals.clear()
    _handlers.update({number: signal.getsignal(number) for number in _SIGNALS})
    for number, handler in _handlers.items():
        # Shells make background jobs ignore some signals, and so does `nohup`.
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        if _signals:
            # Everything has stopped. Another signal would interrupt the interpreter's exit.
            for number in _handlers:
                signal.signal(number, signal.SIG_IGN)
        else:
            leave_signals()


def leave_signals() -> None:
    """Restore the signal handlers from before the command, for programs that handle signals."""
    for number, handler in _handlers.items():
        if handler is not None:
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    now = time.monotonic()
    _signals.append(now)
    if len(_signals) > 1 and now - _signals[-2] < _REPEAT_SECONDS:
        return
    _complain(f"{_SIGNALS[signal.Signals(number)]}: stopping; repeat to kill the processes that still run")
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
