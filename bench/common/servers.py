"""Servers of the benchmarks: their options, their settings and their workers."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from openai import OpenAI

from bench.common.children import python_path
from bench.common.engine import DECODE_GRAPHS, Variant
from bench.common.models import SHAPES, Model
from bench.common.worker import EXTENSION
from vllm_sparse_plugin.tools.provenance import describe_gpu
from vllm_sparse_plugin.tools.server import ServerSettings

LOG_LINES = 80
"""Lines of a log that a failure shows."""
ServedModel = Annotated[str, typer.Option("--model", help=f"{', '.join(SHAPES)} (random weights), or a folder.")]
AdditionalConfig = Annotated[
    str | None,
    typer.Option("--additional-config", help="For the plugin's backends.", metavar="JSON"),
]
ServerArgument = Annotated[
    list[str] | None,
    typer.Option(
        "--server-argument",
        help="Further argument of `vllm serve`, repeatable. It replaces the decode-only CUDA graphs.",
    ),
]
StartSeconds = Annotated[float, typer.Option("--start-seconds", min=1, help="Time limit of a server's start.")]
_DECODE_GRAPHS = ("--compilation-config", json.dumps(DECODE_GRAPHS))


def server_settings(
    model: Model,
    variant: Variant,
    max_model_len: int,
    additional_config: str | None,
    server_arguments: list[str] | None,
    start_seconds: float,
    compiled: bool = False,
) -> ServerSettings:
    """Settings of a variant's server; arguments are those of `serve`.

    Unless `compiled`, a server has decode-only CUDA graphs and starts without the minute of torch.compile.
    """
    arguments = ["--kv-cache-dtype", variant.kv_cache_dtype, "--worker-extension-cls", EXTENSION]
    if model.drawn_weights:
        arguments += ["--load-format", "dummy"]
    gpu = bool(describe_gpu())
    if server_arguments:
        arguments += server_arguments
    elif gpu and not compiled:
        arguments += _DECODE_GRAPHS
    return ServerSettings(
        model.folder,
        max_model_len,
        variant.backend,
        variant.additional_config(additional_config),
        tuple(arguments),
        eager=not gpu,
        # `collective_rpc` needs the development mode.
        environment={"PYTHONPATH": python_path(), "VLLM_SERVER_DEV_MODE": "1"},
        start_seconds=start_seconds,
        log_lines=LOG_LINES,
    )


def prepare_server(client: OpenAI, variant: Variant, model: Model) -> str:
    """Draws the weights of a model without a checkpoint, and returns the attention backend of a server's layers.

    Args:
        client: of a server with the settings of `server_settings`.
        variant: the requested backend.
        model: the served model.

    Raises:
        WrongBackendError: if vLLM chose another attention backend.
    """
    url = str(client.base_url).removesuffix("/v1/")

    def call_workers(method: str) -> Any:
        reply: Any = client.post(f"{url}/collective_rpc", cast_to=object, body={"method": method})
        return reply["results"][0]

    backend = variant.check_backends(call_workers("attention_backends"))
    if model.drawn_weights:
        call_workers("draw_weights")
    return backend
