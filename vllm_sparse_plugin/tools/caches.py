"""Cache folders: the user's, and a temporary one for compiled kernels if no other is writable, as in containers."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from vllm_sparse_plugin.tools.files import can_be_made

_NUMBA = "NUMBA_CACHE_DIR"
"""Numba's environment variable. Numba refuses to compile without a writable folder."""


def ensure_caches() -> None:
    """If neither the home nor the package is writable, point Numba to a folder that is removed at exit."""
    if _NUMBA in os.environ or _numba_has_a_folder():
        return
    with suppress(OSError):  # without a writable folder, Numba stays unchanged
        folder = tempfile.mkdtemp(prefix="vllm-sparse-numba-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[_NUMBA] = folder


def user_cache() -> Path:
    """Return the user's cache folder."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base)
    return Path("~/Library/Caches" if sys.platform == "darwin" else "~/.cache").expanduser()


def _numba_has_a_folder() -> bool:
    """Return whether Numba can write beside the kernels or to the user's cache."""
    kernels = importlib.util.find_spec("sparse_kernels")
    beside = [Path(place) for place in kernels.submodule_search_locations or ()] if kernels else []
    return any(can_be_made(folder) for folder in (*beside, user_cache()))
