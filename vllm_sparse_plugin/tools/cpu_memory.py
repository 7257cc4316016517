"""Default KV-cache memory of vLLM's CPU build.

vLLM's default is 92 % of all memory for any model. It does not start if less is free. A server writes the whole cache
at start, so a large cache makes the start slow.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vllm_sparse_plugin.offload.memory import available_memory
from vllm_sparse_plugin.tools.cores import is_cpu_build
from vllm_sparse_plugin.tools.models import folder_of

SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's environment variable: GiB of KV cache per worker. It overrides the options in `_OPTIONS`."""
_OPTIONS = ("kv-cache-memory-bytes", "gpu-memory-utilization")
_SHARE, _MOST_GIB = 4, 32
_SYSTEM = Path("/sys/devices/system")


def choose_space(arguments: Sequence[str]) -> str | None:
    """Set the variable for this process and return a sentence about it. Do nothing if the user has chosen a size.

    The size is a quarter of the memory that is free besides the model's weights, from 1 to 32 GiB. Weights of unknown
    size count as half of the memory.

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


def _is_chosen(arguments: Sequence[str]) -> bool:
    """Return whether an option or the file of `--config` sets the memory."""
    texts = [argument.replace("_", "-") for argument in arguments if argument.startswith("--")]
    with suppress(OSError, ValueError):
        if (config := value_of("config", arguments)) is not None:
            texts.append(Path(config).read_text(encoding="utf-8").replace("_", "-"))
    return any(option in text for text in texts for option in _OPTIONS)


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """Return the last value of a vLLM option, given as `--option value` or `--option=value`; None without it."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, given = argument.partition("=")
        if name.replace("_", "-") == f"--{option}":
            value = given if equals else following
    return value


def _weights(arguments: Sequence[str]) -> int | None:
    """Return the bytes of the model's weights; None if they are not on this machine."""
    named = value_of("model", arguments)
    if named is None and arguments and not arguments[0].startswith("-"):
        named = arguments[0]
    if named is None:
        return None
    with suppress(OSError):
        files = [file.stat().st_size for file in folder_of(named).glob("*") if file.suffix in (".safetensors", ".bin")]
        return sum(files) or None
    return None
