"""Sparse decode attention for vLLM: `vllm serve MODEL --attention-backend unique`."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vllm-sparse-plugin")
except PackageNotFoundError:
    __version__ = "0.0.0"


def announce() -> None:
    """Entry point of `vllm.platform_plugins`: makes the backends' names known, and brings no platform.

    vLLM calls it while it finds its platform, which is before `LLM(attention_config={...})` is validated; general
    plugins are loaded after.
    """
    from vllm_sparse_plugin import compat, registration

    compat.register_backend_names(registration.BACKENDS)


def register() -> None:
    """Entry point of `vllm.general_plugins`: makes the attention backends known to vLLM.

    Idempotent, and called by vLLM in every process it starts. Changes nothing until one of the backends is chosen.
    """
    from vllm_sparse_plugin import registration

    registration.register()
