"""Sparse decode attention for vLLM: `vllm serve MODEL --attention-backend unique`."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vllm-sparse-plugin")
except PackageNotFoundError:
    __version__ = "0.0.0"


def register() -> None:
    """Entry point of `vllm.general_plugins`: makes the attention backends known to vLLM.

    Idempotent, and called by vLLM in every process it starts. Changes nothing until one of the backends is chosen.
    """
    from vllm_sparse_plugin import registration

    registration.register()
