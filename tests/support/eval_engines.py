"""The engine of `vllm-sparse eval` in a process that `support.engines` forks: it starts no further process."""

from pathlib import Path
from typing import Any

from support.engines import in_fresh_process

from vllm_sparse_plugin.tools.eval.endpoints import Reply, Request


def ask_engine(
    model: Path, arguments: dict[str, Any], most_tokens: int, batch: int, requests: list[Request]
) -> list[Reply]:
    """The replies of a new engine."""
    return in_fresh_process(_ask, str(model), arguments, most_tokens, batch, requests)


def _ask(model: str, arguments: dict[str, Any], most_tokens: int, batch: int, requests: list[Request]) -> list[Reply]:
    from vllm_sparse_plugin.tools.eval.engine import Engine

    return list(Engine(model, arguments, most_tokens, forcing=True, batch=batch).complete(requests))
