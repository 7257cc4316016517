"""Remembers our part of the configuration of the engine that this process loads.

vLLM calls class methods of a backend with and without its configuration at hand, but it builds the layers with it, and
first. So the layers leave our settings here, and the class methods find them.
"""

from __future__ import annotations

from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none

from vllm_sparse_plugin.config import ResolvedConfig
from vllm_sparse_plugin.engine_settings import EngineSettings, settings_of

_remembered: list[EngineSettings] = []


def remember() -> int:
    """Keeps our settings of the configuration that vLLM builds a layer with; returns its longest context in tokens."""
    vllm_config = get_current_vllm_config()
    _remembered[:] = [settings_of(vllm_config)]
    return vllm_config.model_config.max_model_len if vllm_config.model_config else 0


def current(preset: str) -> ResolvedConfig:
    """Returns the configuration of the engine being loaded, for a backend of this preset."""
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is not None:
        return settings_of(vllm_config).resolve(preset)
    return (_remembered[0] if _remembered else EngineSettings()).resolve(preset)
