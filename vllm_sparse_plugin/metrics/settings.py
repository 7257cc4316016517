"""States the settings of a server at `/metrics`, so that a client can tell which server answers it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from prometheus_client import REGISTRY, Gauge, Metric
from prometheus_client.registry import Collector

from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.metrics.dropping import dropping

SETTINGS = "vllm_sparse_settings_info"
"""The metric's name. Its labels are the attention backend and the settings that differ from the schema's defaults."""
_gauge = Gauge(
    SETTINGS, "Attention backend and settings of sparse attention; always 1.", ["backend", "settings"], registry=None,
    multiprocess_mode="mostrecent",
)  # fmt: skip


class _Collector(Collector):
    """vLLM removes every collector whose name begins like its own. This one has no name."""

    def collect(self) -> Iterable[Metric]:
        """Return the metric."""
        return _gauge.collect()


def state_settings(backend: str, config: ResolvedConfig) -> None:
    """Publish the settings of the engine that starts, in place of those of an earlier one.

    Args:
        backend: name of the attention backend.
        config: its settings.
    """
    with dropping("the settings are not stated"):
        _gauge.clear()
        _gauge.labels(backend.lower(), config.config.model_dump_json(by_alias=True, exclude_defaults=True)).set(1)
        _register()


@cache
def _register() -> None:
    REGISTRY.register(_Collector())
