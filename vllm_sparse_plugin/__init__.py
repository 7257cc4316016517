"""Sparse decode attention for vLLM: `vllm serve MODEL --attention-backend unique`."""

import logging
from collections.abc import Callable
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

    def names() -> None:
        from vllm_sparse_plugin import registration

        registration.announce()

    _try(names)


def register() -> None:
    """Entry point of `vllm.general_plugins`: makes the attention backends known to vLLM.

    Idempotent, and called by vLLM in every process it starts. Changes nothing until one of the backends is chosen.
    """

    def backends() -> None:
        from vllm_sparse_plugin import registration

        registration.register()

    _try(backends)


def _try(step: Callable[[], None]) -> None:
    """Takes a step, of which no failure may end the vLLM of a user who has merely installed the plugin."""
    try:
        step()
    except Exception as error:
        logger = logging.getLogger(f"vllm.{__name__}")
        reason = f"{type(error).__name__}: {error}"
        logger.warning("vllm-sparse-plugin %s: its attention backends are not available: %s", __version__, reason)
        logger.debug("vllm-sparse-plugin", exc_info=True)
