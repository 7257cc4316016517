"""Notices about compaction that depend on more than its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_sparse_plugin.config import KEY, ResolvedConfig
from vllm_sparse_plugin.engine_traits import layers_over_everything

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def compaction_notices(vllm_config: VllmConfig, config: ResolvedConfig) -> list[str]:
    """Returns the sentences that apply to an engine; none without compaction.

    Args:
        vllm_config: vLLM's configuration.
        config: the settings of the plugin.
    """
    if config.compaction is None:
        return []
    sentence = _about_equal_budgets(config, layers_over_everything(vllm_config))
    return [] if sentence is None else [sentence]


def _about_equal_budgets(config: ResolvedConfig, layers: int) -> str | None:
    assert config.compaction is not None
    pyramid = config.compaction.retention().pyramid
    if pyramid is None or pyramid.beta == 1 or pyramid.classes == 1 or layers < 2:
        return None
    if len(set(pyramid.shares(layers))) > 1:
        return None
    return (
        f"{KEY}.compaction.layer_classes: no number of classes from 2 to {pyramid.classes} divides the {layers} layers "
        f"that attend to everything, so all of them keep the same budget, as with snapkv; set a divisor of {layers}."
    )
