"""The commands `vllm-sparse serve` and `vllm-sparse bench`: vLLM's own, with our backends known to them."""

from __future__ import annotations

import sys

import typer

from vllm_sparse_plugin.tools.cores import core_left_free


def serve(context: typer.Context) -> None:
    """Start vLLM's OpenAI-compatible server: the same arguments as `vllm serve`."""
    if sentence := core_left_free():
        print(f"vllm-sparse: {sentence}", file=sys.stderr)
    _run("serve", context)


def bench(context: typer.Context) -> None:
    """Run vLLM's benchmarks: the same arguments as `vllm bench`."""
    _run("bench", context)


def _run(command: str, context: typer.Context) -> None:
    from vllm_sparse_plugin import compat

    compat.run_vllm_cli([command, *context.args])
