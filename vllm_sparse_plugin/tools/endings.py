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
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from vllm_sparse_plugin.errors import ConfigurationError

BAD_INPUT, FAILED = 2, 3
_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
UNWRITABLE = {
    errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENOSPC, errno.EPERM, errno.EROFS,
}  # fmt: skip
"""Errors of a disk or its permissions."""
_WIDTH = 160
"""Columns of tables without a terminal."""
_handlers: dict[int, Any] = {}
"""Signal handlers from before the command."""


class FailureError(RuntimeError):
    """A server or an engine failed. The message is a sentence."""


def open_console() -> Console:
    """Return a console for a command's output. Tables have a fixed width without a terminal."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDTH)


def say(console: Console, text: str) -> None:
    """Print a text as it is: lines are not wrapped, and brackets are no markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def run(command: Callable[[], Any]) -> None:
    """Run a command line and end the process with a code of the table above.

    Args:
        command: a Typer application.
    """
    for stream in (sys.stdout, sys.stderr):
        # A file name may contain bytes that no encoding accepts.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    # Signals end the command like an exception, which ends its child processes. Shells make background jobs ignore
    # some signals, and so does `nohup`.
    kept = {number: signal.getsignal(number) for number in _SIGNALS}
    _handlers.update({n: old for n, old in kept.items() if old in (signal.SIG_DFL, signal.default_int_handler)})
    for number in _handlers:
        signal.signal(number, _interrupt)
    try:
        code, sentence = _outcome(command)
    finally:
        leave_signals()
    if sentence:
        print(f"error: {' '.join(sentence.splitlines())}", file=sys.stderr)
    sys.exit(code)


def leave_signals() -> None:
    """Restore the signal handlers from before the command, for programs that handle signals."""
    while _handlers:
        signal.signal(*_handlers.popitem())


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
    except FailureError as error:
        return FAILED, str(error)
    except (MemoryError, RuntimeError) as error:
        # torch has errors of its own, on a GPU and on a CPU.
        names = ("MemoryError", "OutOfMemoryError")
        if type(error).__name__ not in names and "DefaultCPUAllocator" not in str(error):
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


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    for each in _handlers:  # a second signal must not interrupt the clean-up
        signal.signal(each, signal.SIG_IGN)
    print(f"{_SIGNALS[signal.Signals(number)]}: stopping", file=sys.stderr)
    sys.exit(128 + number)
