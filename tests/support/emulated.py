"""Compiles CUDA headers for a CPU, with the emulated warps of `support/warps`."""

import shutil
import subprocess
from pathlib import Path

import pytest
import sparse_kernels

ROOT = Path(sparse_kernels.__file__).parent
HEADERS = ROOT / "cuda"
_WARPS = Path(__file__).parent / "warps"

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compile_program(folder: Path, name: str, sources: tuple[Path, ...], *options: str) -> Path:
    """Compiles `support/warps/NAME.cpp` beside CUDA sources, in a folder. Returns the program."""
    for source in (*sources, _WARPS / "common.cuh", _WARPS / f"{name}.cpp"):
        shutil.copy(source, folder)
    compiler = ["g++", "-std=c++20", "-O1", "-w", "-pthread"]
    subprocess.run([*compiler, *options, f"{name}.cpp", "-o", name], cwd=folder, check=True)
    return folder / name
