"""Imports Triton if it is installed, for modules with a Triton form and a torch form.

Without Triton, `jit` and `constexpr` return their argument, and the Triton functions are never called.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def _leave(argument: Any) -> Any:
    return argument


tl: Any = None
jit: Any = _leave
constexpr: Any = _leave
if find_spec("triton") is not None:
    import triton

    tl, jit, constexpr = triton.language, triton.jit, triton.language.constexpr

__all__ = ["constexpr", "jit", "tl"]
