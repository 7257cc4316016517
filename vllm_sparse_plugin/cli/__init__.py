"""The `vllm-sparse` command."""

from vllm_sparse_plugin.cli.app import main

__all__ = ["main"]
