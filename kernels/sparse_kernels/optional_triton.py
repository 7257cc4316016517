"""Triton where it is installed, for modules that define their Triton form beside their torch form.

Without it `jit` leaves functions as they are; nothing calls them then.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def _leave(function: Any) -> Any:
    return function


tl: Any = None
jit: Any = _leave
if find_spec("triton") is not None:
    import triton

    tl, jit = triton.language, triton.jit

__all__ = ["jit", "tl"]
