"""Arguments of requests as an engine hands them to its workers."""

from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.requests.check import normal_form


def entered(arguments: dict | None, config: ResolvedConfig, on_gpu: bool = False) -> dict:
    """The normal form of a request's arguments; without those that the settings refuse."""
    try:
        return normal_form(arguments or {}, config, 8, on_gpu)
    except ValueError:
        return {}
