"""Takes our settings from a configuration of vLLM: what the user gave, and what the model brings along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_sparse_plugin.config import KEY, ResolvedConfig, resolve, trained_section

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class EngineSettings(NamedTuple):
    """What an engine is told of sparse attention."""

    given: Any = None
    """Our part of `--additional-config`, or None."""
    trained: dict[str, Any] | None = None
    """The section of the model's config.json, or None."""

    def resolve(self, preset: str) -> ResolvedConfig:
        """Returns what they come to for a backend of this preset; see `config.resolve`."""
        return resolve(self.given, preset, self.trained)


def settings_of(vllm_config: VllmConfig) -> EngineSettings:
    """Returns the settings of an engine."""
    additional, model = vllm_config.additional_config, vllm_config.model_config
    given = additional.get(KEY) if isinstance(additional, Mapping) else None
    return EngineSettings(given, trained_section(model.hf_config) if model is not None else None)
