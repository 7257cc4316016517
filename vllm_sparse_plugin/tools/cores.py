"""Which cores vLLM's CPU build runs a model on.

Unless it is told otherwise, vLLM takes one hardware thread of each core of the first NUMA node and leaves the last core
to its scheduler: half of a machine of two cores.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's environment variable: CPU numbers for the threads of each worker."""
_FEW_CORES = 8
"""From here on upwards one core more or less makes little difference."""
_SYSTEM = Path("/sys/devices/system")


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is the build for CPUs."""
    for name in ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError):
            return name == "vllm-cpu" or version(name).endswith("+cpu")
    return False


def serve_command() -> str:
    """Return the command that starts a server; the CPU build of vLLM has none of its own that works."""
    return "vllm-sparse serve" if is_cpu_build() else "vllm serve"


def bind_to_every_core(system: Path = _SYSTEM) -> dict[str, str]:
    """Return the variable that gives vLLM every core of this machine.

    It is left out where the user has set it, where vLLM runs on a GPU, and where there are several NUMA nodes, one of
    which vLLM chooses.

    Args:
        system: folder in which Linux describes the machine.
    """
    if BIND in os.environ or not is_cpu_build() or len(list(system.glob("node/node[0-9]*"))) > 1:
        return {}
    return {BIND: ",".join(map(str, _one_thread_per_core(system)))}


def core_left_free() -> str | None:
    """Return a sentence for users of a small machine about the core that vLLM leaves free, if it does."""
    cores = bind_to_every_core().get(BIND, "")
    count = len(cores.split(","))
    if not 1 < count <= _FEW_CORES:
        return None
    return f"vLLM leaves one of {count} cores to its scheduler; {BIND}={cores} gives the model all of them."


def _one_thread_per_core(system: Path) -> list[int]:
    """Return the CPUs that this process may use, the first of each core."""
    threads: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = system / f"cpu/cpu{cpu}/topology/thread_siblings_list"
        threads.setdefault(siblings.read_text(encoding="utf-8") if siblings.exists() else str(cpu), cpu)
    return list(threads.values())
