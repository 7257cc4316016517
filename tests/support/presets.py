"""Lets a test name a preset where a server names a backend."""

from typing import Any

from vllm_sparse_plugin.config import preset_names
from vllm_sparse_plugin.names import BACKENDS, KEY, backend_beside


def serving(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an engine. A preset that is no backend, as `attention_backend`, becomes a setting."""
    name = str(arguments.get("attention_backend"))
    if name.upper() in BACKENDS or name not in preset_names():
        return arguments
    additional = dict(arguments.get("additional_config") or {})
    additional[KEY] = {"preset": name, **(additional.get(KEY) or {})}
    return arguments | {"attention_backend": backend_beside(name), "additional_config": additional}
