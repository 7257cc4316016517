"""Remembers our part of the configuration of the engine that this process loads.

vLLM calls class methods of a backend with and without its configuration at hand, but it builds the layers with it, and
first. So the layers leave our settings here, and the class methods find them.
"""

from __future__ import annotations

from typing import NamedTuple

from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none

from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.engine_settings import EngineSettings, settings_of

_remembered: list[EngineSettings] = []


class ModelSize(NamedTuple):
    """What a layer is told of its model."""

    longest_context: int
    """In tokens."""
    num_layers: int


def remember() -> ModelSize:
    """Keeps our settings of the configuration that vLLM builds a layer with; returns the size of its model."""
    vllm_config = get_current_vllm_config()
    _remembered[:] = [settings_of(vllm_config)]
    model = vllm_config.model_config
    return (
        ModelSize(model.max_model_len, model.get_num_layers(vllm_config.parallel_config)) if model else ModelSize(0, 0)
    )


def current(preset: str) -> ResolvedConfig:
    """Returns the configuration of the engine being loaded, for a backend of this preset."""
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is not None:
        return settings_of(vllm_config).resolve(preset)
    return (_remembered[0] if _remembered else EngineSettings()).resolve(preset)
