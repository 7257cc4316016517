"""The commands `vllm-sparse serve` and `vllm-sparse bench`: vLLM's commands, with the plugin's backends registered."""

from __future__ import annotations

import sys

import typer

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.names import BACKENDS
from vllm_sparse_plugin.tools.cores import core_left_free
from vllm_sparse_plugin.tools.cpu_memory import choose_space, value_of


def serve(context: typer.Context) -> None:
    """Start vLLM's OpenAI-compatible server: the same arguments as `vllm serve`."""
    backend = value_of("attention-backend", context.args)
    if backend is not None and backend.upper() not in BACKENDS:
        _expect_vllms(backend)
    _say(core_left_free(), choose_space(context.args))
    _run("serve", context)


def bench(context: typer.Context) -> None:
    """Run vLLM's benchmarks: the same arguments as `vllm bench`."""
    if context.args[:1] in (["latency"], ["throughput"]):  # they start an engine
        _say(choose_space(context.args[1:]))
    _run("bench", context)


def _say(*sentences: str | None) -> None:
    for sentence in sentences:
        if sentence:
            print(f"vllm-sparse: {sentence}", file=sys.stderr)


def _expect_vllms(backend: str) -> None:
    """Refuse a name that neither the plugin nor vLLM has. vLLM would print a traceback.

    Raises:
        ConfigurationError: lists the plugin's names.
    """
    # Imported here: it takes seconds.
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if backend.upper() not in AttentionBackendEnum.__members__:
        names = ", ".join(name.lower() for name in BACKENDS)
        raise ConfigurationError(f"attention_backend: got {backend!r}, allowed: {names}, or a backend of vLLM's own")


def _run(command: str, context: typer.Context) -> None:
    from vllm_sparse_plugin import compat

    compat.run_vllm_cli([command, *context.args])
