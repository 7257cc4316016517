"""How much memory vLLM's CPU build takes for the KV cache, where the user has not said.

By itself it takes 92 % of all memory, whatever the model, and does not start where less is free. All of the cache is
written when a server starts, so a large one makes the start slow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vllm_sparse_plugin.tools.cores import is_cpu_build
from vllm_sparse_plugin.tools.models import folder_of

SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's environment variable: GiB of KV cache of a worker. It overrides the options of `_OPTIONS`."""
_OPTIONS = ("kv-cache-memory-bytes", "gpu-memory-utilization")
_SHARE, _MOST_GIB = 4, 32
_SYSTEM = Path("/sys/devices/system")
_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def choose_space(arguments: Sequence[str]) -> str | None:
    """Set the variable for this process and return a sentence about it; without effect where the user has chosen.

    It is a quarter of the memory that is free beside the model's weights, from 1 to 32 GiB. Weights whose size is
    unknown count as half of the memory.

    Args:
        arguments: of `vllm serve`.
    """
    if os.environ.get(SPACE) or not is_cpu_build() or _is_chosen(arguments):
        return None
    available = available_memory()
    if available is None:
        return None
    weights = _weights(arguments)
    beside = available - (available // 2 if weights is None else weights)
    nodes = max(1, len(list(_SYSTEM.glob("node/node[0-9]*"))))
    space = min(max(beside // _SHARE // nodes >> 30, 1), _MOST_GIB)
    os.environ[SPACE] = str(space)
    return f"{SPACE}={space}: the KV cache takes {space} GiB of memory. Set the variable to choose another size."


def available_memory() -> int | None:
    """Return the bytes that this machine, or the container, can still give; None where it does not say."""
    found = []
    with suppress(OSError, ValueError):
        match = re.search(r"^MemAvailable: +(\d+) kB", _MEMORY.read_text(encoding="utf-8"), re.MULTILINE)
        found += [int(match[1]) << 10] if match else []
    with suppress(OSError, ValueError):
        most, used = (int((_CGROUP / f"memory.{name}").read_text(encoding="utf-8")) for name in ("max", "current"))
        found.append(max(0, most - used))
    return min(found, default=None)


def _is_chosen(arguments: Sequence[str]) -> bool:
    """Return whether an option, or the file of `--config`, says how much memory to take."""
    texts = [argument.replace("_", "-") for argument in arguments if argument.startswith("--")]
    with suppress(OSError, ValueError):
        if (config := value_of("config", arguments)) is not None:
            texts.append(Path(config).read_text(encoding="utf-8").replace("_", "-"))
    return any(option in text for text in texts for option in _OPTIONS)


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """Return the last value of an option of vLLM, given as `--option value` or `--option=value`; None without it."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, given = argument.partition("=")
        if name.replace("_", "-") == f"--{option}":
            value = given if equals else following
    return value


def _weights(arguments: Sequence[str]) -> int | None:
    """Return the bytes of the model's weights, None where they are not on this machine."""
    named = value_of("model", arguments)
    if named is None and arguments and not arguments[0].startswith("-"):
        named = arguments[0]
    if named is None:
        return None
    with suppress(OSError):
        files = [file.stat().st_size for file in folder_of(named).glob("*") if file.suffix in (".safetensors", ".bin")]
        return sum(files) or None
    return None
