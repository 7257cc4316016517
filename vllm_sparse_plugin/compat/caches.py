"""Changes to vLLM's allocation of the KV cache."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from vllm_sparse_plugin.compat.engine import HOOKED

_ALLOCATING = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils")
"""Modules of vLLM's two model runners that allocate the KV cache."""


def hook_cache_allocation(allocate: Callable[..., Any]) -> None:
    """Makes the model runners of this process allocate the KV cache by a function. Idempotent.

    Reason: offloading keeps keys and values in host memory. vLLM allocates all blocks on the device.
    Versions: 0.32, 0.33. Remove when a backend can choose the memory of its cache.

    Args:
        allocate: takes vLLM's function and its arguments; returns the cache of each layer by name.
    """
    for name in _ALLOCATING:
        # Only the module of this worker's runner has been imported.
        module = sys.modules.get(name)
        vllms: Any = getattr(module, "allocate_kv_cache", None)
        if vllms is None or getattr(vllms, HOOKED, False):
            continue
        allocating = functools.wraps(vllms)(functools.partial(allocate, vllms))
        setattr(allocating, HOOKED, True)
        setattr(module, "allocate_kv_cache", allocating)  # noqa: B010
