"""Triton where it is installed, for modules that define their Triton form beside their torch form.

Without it `jit` leaves functions as they are; nothing calls them then.
"""

from __future__ import annotations

from typing import Any

tl: Any
jit: Any
try:
    import triton.language as tl
    from triton import jit
except ImportError:
    tl = None

    def jit(function: Any) -> Any:
        """Stands in for `triton.jit`."""
        return function


__all__ = ["jit", "tl"]
