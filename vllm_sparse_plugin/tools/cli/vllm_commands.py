"""The commands `vllm-sparse serve` and `vllm-sparse bench`: vLLM's commands, with the plugin's backends registered."""

from __future__ import annotations

import sys

import typer

from vllm_sparse_plugin.tools.arguments import expect_backend
from vllm_sparse_plugin.tools.cores import core_left_free
from vllm_sparse_plugin.tools.cpu_memory import choose_space, value_of


def serve(context: typer.Context) -> None:
    """Start vLLM's OpenAI-compatible server: the same arguments as `vllm serve`."""
    backend = value_of("attention-backend", context.args)
    if backend is not None:
        expect_backend(backend)
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


def _run(command: str, context: typer.Context) -> None:
    from vllm_sparse_plugin import compat

    compat.run_vllm_cli([command, *context.args])
