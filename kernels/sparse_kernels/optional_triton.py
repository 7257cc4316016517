"""Gives Triton, where it is installed, to modules that define their Triton form beside their torch form.

Without it `jit` and `constexpr` leave what they get as it is; nothing calls the functions then.
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
