"""Cores that vLLM's CPU build runs a model on.

By default, vLLM takes one hardware thread per core of the first NUMA node and leaves the last core to its scheduler:
half of a machine with two cores.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's environment variable: CPU numbers for the threads of each worker."""
_FEW_CORES = 8
"""From this number of cores on, one core makes little difference."""
_SYSTEM = Path("/sys/devices/system")


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is the CPU build."""
    for name in ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError):
            return name == "vllm-cpu" or version(name).endswith("+cpu")
    return False


def serve_command() -> str:
    """Return the command that starts a server. vLLM's CPU build has no working command."""
    return "vllm-sparse serve" if is_cpu_build() else "vllm serve"


def bind_to_every_core(system: Path = _SYSTEM) -> dict[str, str]:
    """Return the variable that gives vLLM every core of this machine.

    Empty if the user set the variable, if vLLM runs on a GPU, and with several NUMA nodes, because vLLM then chooses
    one.

    Args:
        system: folder where Linux describes the machine.
    """
    if BIND in os.environ or not is_cpu_build() or len(list(system.glob("node/node[0-9]*"))) > 1:
        return {}
    return {BIND: ",".join(map(str, _one_thread_per_core(system)))}


def core_left_free() -> str | None:
    """Return a sentence about the core that vLLM leaves free on a small machine; None if it leaves none."""
    cores = bind_to_every_core().get(BIND, "")
    count = len(cores.split(","))
    if not 1 < count <= _FEW_CORES:
        return None
    return f"vLLM leaves one of {count} cores to its scheduler; {BIND}={cores} gives the model all of them."


def _one_thread_per_core(system: Path) -> list[int]:
    """Return the first CPU of each core that this process may use."""
    threads: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = system / f"cpu/cpu{cpu}/topology/thread_siblings_list"
        threads.setdefault(siblings.read_text(encoding="utf-8") if siblings.exists() else str(cpu), cpu)
    return list(threads.values())
