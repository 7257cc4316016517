"""Builds a backend class for a registered name and the current platform, on first use."""

from __future__ import annotations

import functools
from typing import Any

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS


def __getattr__(name: str) -> Any:
    if name not in BACKENDS:
        raise AttributeError(name)
    return _backend(name)


@functools.cache
def _backend(name: str) -> type:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm_sparse_plugin.attention.cpu.backend import SparseCPUBackend

        base: type = SparseCPUBackend
    elif current_platform.is_cuda():
        from vllm_sparse_plugin.attention.cuda.backend import SparseCUDABackend

        base = SparseCUDABackend
    else:
        raise ConfigurationError(
            f"platform: got {current_platform.device_name}, allowed with attention backend {name.lower()}: "
            "NVIDIA GPUs or vLLM's CPU build"
        )

    # vLLM looks up the name in its enumeration, and hashes module and name.
    attributes = {"get_name": staticmethod(lambda: name), "preset": BACKENDS[name], "__module__": __name__}
    return type(name, (base,), attributes)
