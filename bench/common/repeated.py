"""A function that a thread calls again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(look: Callable[[], bool], seconds: float) -> Iterator[None]:
    """Call a function in a thread, within the context and as long as it returns True.

    Args:
        look: the function.
        seconds: before each call.
    """
    over = threading.Event()

    def look_again() -> None:
        while not over.wait(seconds) and look():
            pass

    thread = threading.Thread(target=look_again, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
