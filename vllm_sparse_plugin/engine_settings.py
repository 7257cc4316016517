"""Resolves the settings of sparse attention, once for each configuration of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from vllm_sparse_plugin.config import KEY, ResolvedConfig, resolve, trained_section

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_resolved: dict[int, tuple[ref[VllmConfig], EngineSettings, str, ResolvedConfig]] = {}
"""The resolved settings of each living configuration of vLLM, by its identity. A configuration cannot keep them itself:
vLLM copies configurations field by field and refuses attributes that are no field."""


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
    settings, key = settings_of(vllm_config), id(vllm_config)
    kept = _resolved.get(key)
    if kept is None or kept[0]() is not vllm_config or kept[1:3] != (settings, preset):
        config = resolve(settings.given, preset, settings.trained)
        kept = ref(vllm_config, lambda _: _resolved.pop(key, None)), settings, preset, config
        _resolved[key] = kept
    return kept[3]
