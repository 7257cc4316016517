"""Shared fixtures. Memory that operations allocate is poisoned, so an unwritten output fails a test.

Folders of tests run in two processes, one file at a time in each. A single file, `-n 0` and `-p no:xdist` use one.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support import tiers
from support.interpreter import interpret_kernels
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "models" / "needle-8m"

# The engine of an `LLM` is spawned. It shares the cores with the tests.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
if "PYTEST_XDIST_WORKER" in os.environ:
    # The test processes and their engines share compiled kernels.
    os.environ["NUMBA_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "numba")

interpret_kernels()

# torch collects the functions that follow `with torch.device(...)` once. Replacements made by tests do not follow it.
_device_constructors()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Start two test processes: with a third, engines and tests wait for each other's cores."""
    option = config.option
    # Worker processes also call this function, and must not start more.
    if hasattr(config, "workerinput") or not hasattr(option, "numprocesses"):
        return
    folders = all(Path(argument).is_dir() for argument in config.args)
    alone = option.collectonly or option.usepdb or torch.cuda.is_available() or len(os.sched_getaffinity(0)) < 2
    if option.numprocesses is None and folders and not alone:
        option.numprocesses = 2
    if option.numprocesses:
        # Waiting threads must not spin: there are more threads than cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if option.numprocesses and option.dist == "no":
        # Fixtures of a module and compiled kernels are shared within a file; the longest files come first.
        option.dist, option.loadscopereorder = "loadfile", False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also engines, compiled sources and slow tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return tiers.ignores(collection_path, config) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.mark(items)
    left_out = [item for item in items if tiers.leaves_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture
def model() -> str:
    return str(MODEL)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs Triton kernels in Triton's interpreter. Tests with this fixture are skipped if this is impossible."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("beside a GPU Triton compiles its kernels, which are tested there")
    # Modules that Triton imports at the first launch must be interpreted too.
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _environment() -> Iterator[None]:
    """Restores environment variables after each file, because engines change those of their process."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` in the operations returns NaN (or an integer), so results of earlier calls cannot pass."""

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


@pytest.fixture(autouse=True, scope="session")
def _inspect_models_in_this_process() -> None:
    """Makes vLLM inspect models in this process. By default it uses a process without CUDA initialisation."""
    registry = sys.modules.get("vllm.model_executor.models.registry")
    if registry is not None and not torch.cuda.is_available():
        registry._run_in_subprocess = lambda inspect: inspect()


@pytest.fixture(autouse=True)
def _default_signals() -> Iterator[None]:
    """Restores signal handlers. An engine in this process replaces them, and commands keep the handlers they find."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in before if main else ():
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items() if main else ():
        if handler is not None:  # a handler that Python did not set
            signal.signal(number, handler)
