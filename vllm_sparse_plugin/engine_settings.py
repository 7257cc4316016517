"""Resolves the settings of sparse attention, once for each configuration of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_sparse_plugin.config import KEY, ResolvedConfig, resolve, trained_section

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_RESOLVED = "_vllm_sparse_resolved"
"""Attribute of a vLLM configuration that keeps its resolved settings. It travels with the configuration to the workers,
so the workers need no YAML file of the user."""


class EngineSettings(NamedTuple):
    """The settings that an engine was given."""

    given: Any = None
    """The value of `sparse_attention` in `--additional-config`, or None."""
    trained: dict[str, Any] | None = None
    """The section of the model's config.json, or None."""


def settings_of(vllm_config: VllmConfig) -> EngineSettings:
    """Returns the settings that an engine was given."""
    additional, model = vllm_config.additional_config, vllm_config.model_config
    given = additional.get(KEY) if isinstance(additional, Mapping) else None
    return EngineSettings(given, trained_section(model.hf_config) if model is not None else None)


def resolved(vllm_config: VllmConfig, preset: str) -> ResolvedConfig:
    """Returns the resolved settings of an engine. The first call resolves them; later calls return the same object.

    Args:
        vllm_config: vLLM's configuration.
        preset: the preset of the chosen backend.

    Raises:
        ConfigurationError: see `config.resolve`.
    """
    settings, kept = settings_of(vllm_config), vars(vllm_config).get(_RESOLVED)
    if kept is None or kept[:2] != (settings, preset):
        kept = settings, preset, resolve(settings.given, preset, settings.trained)
        vars(vllm_config)[_RESOLVED] = kept
    config: ResolvedConfig = kept[2]
    return config
