"""Sparse decode attention for vLLM: `vllm serve MODEL --attention-backend unique`."""

import logging
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vllm-sparse-plugin")
except PackageNotFoundError:
    __version__ = "0.0.0"


def announce() -> None:
    """Entry point of `vllm.platform_plugins`: registers the names of the backends. It adds no platform.

    vLLM calls it while it looks for its platform, before it validates `LLM(attention_config={...})`. It loads general
    plugins after that.
    """

    def names() -> None:
        from vllm_sparse_plugin import registration

        registration.announce()

    _try(names)


def register() -> None:
    """Entry point of `vllm.general_plugins`: registers the attention backends.

    vLLM calls it in every process. It is idempotent and changes nothing until one of the backends is chosen.
    """

    def backends() -> None:
        from vllm_sparse_plugin import registration

        registration.register()

    _try(backends)


def _try(step: Callable[[], None]) -> None:
    """Runs a step and logs its failure: an installed plugin must never end vLLM."""
    try:
        step()
    except Exception as error:
        logger = logging.getLogger(f"vllm.{__name__}")
        reason = f"{type(error).__name__}: {error}"
        logger.warning("vllm-sparse-plugin %s: its attention backends are not available: %s", __version__, reason)
        logger.debug("vllm-sparse-plugin", exc_info=True)
