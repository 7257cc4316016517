"""Shared fixtures: what the operations allocate is poisoned, so that an unwritten output fails."""

import os
import sys
from pathlib import Path

import pytest
import torch
from support.interpreter import interpret_kernels

# The engine of an `LLM` is spawned; it and the tests share two small machines' worth of cores.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

interpret_kernels()

MODEL = Path(__file__).parent.parent / "models" / "needle-8m"


@pytest.fixture
def model() -> str:
    return str(MODEL)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` called from the operations returns NaN (or a whole number), never lucky zeros."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if sys._getframe(1).f_globals.get("__name__", "").startswith("sparse_kernels"):
                whole = -12345 if tensor.itemsize > 1 else 93
                tensor.fill_(float("nan") if tensor.is_floating_point() else whole)
            return tensor

        return wrapper

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
