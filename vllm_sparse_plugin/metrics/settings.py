"""States the settings of a server at `/metrics`, so that a client can tell which server answers it."""

from __future__ import annotations

from prometheus_client import Gauge

from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.metrics.dropping import dropping

SETTINGS = "vllm_sparse_settings_info"
"""The metric's name. Its labels are the attention backend and all settings."""
_gauge = Gauge(
    SETTINGS, "Attention backend and settings of sparse attention; always 1.", ["backend", "settings"],
    multiprocess_mode="mostrecent",
)  # fmt: skip


def state_settings(backend: str, config: ResolvedConfig) -> None:
    """Publish the settings of the engine that starts, in place of those of an earlier one.

    Args:
        backend: name of the attention backend.
        config: its settings.
    """
    with dropping("the settings are not stated"):
        _gauge.clear()
        _gauge.labels(backend.lower(), config.config.model_dump_json(by_alias=True)).set(1)
