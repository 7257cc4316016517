"""Checks what requests say of their own attention, in the process that takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.requests.arguments import ARGUMENTS, pages_of_request

_served: list[ResolvedConfig] = []


def remember(config: ResolvedConfig | None) -> None:
    """Keeps the configuration that requests of this process are served with; None for an engine without our backends.

    vLLM makes its configuration in every process that takes requests, and asks the platform about each of them without
    it.
    """
    _served[:] = [] if config is None else [config]


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuses a request whose arguments cannot be served; without effect unless one of our backends is chosen.

    Args:
        arguments: `extra_args` of the request.

    Raises:
        ValueError: if they cannot be served.
    """
    given = [name for name in ARGUMENTS if name in arguments]
    if not _served or not given:
        return
    from vllm.platforms import current_platform

    pages_of_request(arguments, _served[0], on_gpu=not current_platform.is_cpu())
