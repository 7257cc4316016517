"""Resolves the settings of sparse attention once per configuration of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_sparse_plugin.config import KEY, ResolvedConfig, resolve, trained_section

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _AdditionalConfig(dict[str, Any]):
    """The value of `--additional-config`, together with the resolved settings.

    The resolved settings reach the workers with vLLM's configuration, so workers do not read the user's YAML file. vLLM
    copies a configuration by its fields and would lose an additional attribute.
    """

    kept: tuple[EngineSettings, str, ResolvedConfig] | None = None


class EngineSettings(NamedTuple):
    """The settings that an engine was given."""

    given: Any = None
    """The value of `sparse_attention` in `--additional-config`, or None."""
    trained: dict[str, Any] | None = None
    """The section of the model's config.json, or None."""


def settings_of(vllm_config: VllmConfig) -> EngineSettings:
    """Returns the settings that an engine was given."""
    additional, model = vllm_config.additional_config, vllm_config.model_config
    section = additional.get(KEY) if isinstance(additional, Mapping) else None
    return EngineSettings(section, trained_section(model.hf_config) if model is not None else None)


def resolved(vllm_config: VllmConfig, preset: str) -> ResolvedConfig:
    """Returns the resolved settings of an engine. The first call resolves them; later calls return the same object.

    Args:
        vllm_config: vLLM's configuration.
        preset: the preset of the chosen backend.

    Raises:
        ConfigurationError: see `config.resolve`.
    """
    settings, additional = settings_of(vllm_config), vllm_config.additional_config
    kept = additional.kept if isinstance(additional, _AdditionalConfig) else None
    if kept is not None and kept[:2] == (settings, preset):
        return kept[2]
    config = resolve(settings.given, preset, settings.trained)
    if additional is None or isinstance(additional, dict):
        keeping = _AdditionalConfig(additional or {})
        keeping.kept = settings, preset, config
        vllm_config.additional_config = keeping
    return config
