"""The engine of `vllm-sparse eval` in a process that `support.engines` forks: it starts no further process."""

from pathlib import Path
from typing import Any

from support.engines import in_fresh_process

from vllm_sparse_plugin.tools.eval.endpoints import EndpointError, Reply, Request


def ask_engine(
    model: Path, arguments: dict[str, Any], most_tokens: int, batch: int, requests: list[Request]
) -> list[Reply]:
    """The replies of a new engine."""
    replies, _ = in_fresh_process(_ask, str(model), arguments, most_tokens, batch, requests, [])
    return replies


def ask_and_be_refused(
    model: Path, arguments: dict[str, Any], most_tokens: int, requests: list[Request], refused: list[Request]
) -> tuple[list[Reply], list[str]]:
    """The replies of a new engine, then its errors for requests that it refuses, each in a batch of its own."""
    return in_fresh_process(_ask, str(model), arguments, most_tokens, len(requests), requests, refused)


def _ask(
    model: str, arguments: dict[str, Any], most_tokens: int, batch: int, requests: list[Request],
    refused: list[Request],
) -> tuple[list[Reply], list[str]]:  # fmt: skip
    from vllm_sparse_plugin.tools.eval.engine import Engine

    engine = Engine(model, arguments, most_tokens, forcing=True, batch=batch)
    replies, errors = list(engine.complete(requests)), []
    for request in refused:
        try:
            list(engine.complete([request]))
        except EndpointError as error:
            errors.append(str(error))
    return replies, errors
