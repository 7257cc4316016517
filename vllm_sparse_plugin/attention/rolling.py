"""Finds the rotary positions of a model, for positions that are counted within the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from sparse_kernels.rolling_attention import RollingWindow, Rotation
from torch import nn
from vllm.model_executor.layers.attention import Attention

from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.errors import ConfigurationError, choices
from vllm_sparse_plugin.requests import rows

_MODELS = "vllm.model_executor.models"
_ROTARY = "vllm.model_executor.layers.rotary_embedding"
ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
"""vLLM's attention modules that only rotate queries and keys before they attend."""
ROTATIONS = (
    "RotaryEmbedding", "LinearScalingRotaryEmbedding", "Llama3RotaryEmbedding", "NTKScalingRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)  # fmt: skip
"""vLLM's rotary embeddings with one table, whose angles are proportional to the position."""


class RollingPlan(NamedTuple):
    """Rolling positions of one layer."""

    window: RollingWindow
    rotation: Rotation


def plan_rolling(layers: Mapping[str, Attention], window: RollingWindow, longest: int) -> dict[str, RollingPlan]:
    """Returns the plans of a group of layers, by name.

    Args:
        layers: the layers, of a model that vLLM has loaded.
        window: the window that each token reads.
        longest: tokens of the longest context that the engine serves.

    Raises:
        ConfigurationError: for a layer whose positions are not known to be plain rotations, or if the model's table of
            positions is shorter than `longest`.
    """
    runner = rows.loading_runner()
    modules = [] if runner is None else list(runner.get_model().modules())
    # Attention layers, by the module that directly contains them.
    around = {id(child): module for module in modules for child in module.children() if isinstance(child, Attention)}
    return {name: RollingPlan(window, rotation_of(around.get(id(layer)), longest)) for name, layer in layers.items()}


def rotation_of(module: nn.Module | None, longest: int) -> Rotation:
    """Returns the rotation of an attention module.

    Args:
        module: the module that contains the attention layer; None if unknown.
        longest: tokens of the longest context.

    Raises:
        ConfigurationError: see `plan_rolling`.
    """
    if module is None or not _is_one_of(module, _MODELS, ATTENTIONS):
        got = "unknown" if module is None else type(module).__name__
        raise _refused(f"rolling with {got} layers", f"text, or a model with {choices(ATTENTIONS)}")
    if getattr(module, "do_llama_4_scaling", False):
        raise _refused("rolling with queries that the model scales by position", "text")
    found = [child for child in module.children() if type(child).__module__.startswith(f"{_ROTARY}.")]
    names = ", ".join(type(child).__name__ for child in found) or "no rotary positions"
    if len(found) != 1 or not _is_one_of(found[0], _ROTARY, ROTATIONS) or len(_factors(found[0])) != 1:
        raise _refused(f"rolling with {names}", f"text, or a model with {choices(ROTATIONS)}")
    (rotary,) = found
    table: torch.Tensor = rotary.get_buffer("cos_sin_cache")
    if len(table) < longest:
        # vLLM would read beyond the end of the table, with any attention.
        raise ConfigurationError(
            f"max_model_len: got {longest}, allowed with {KEY}.compaction.positions rolling: up to {len(table)}, the "
            "rows of the model's table of rotary positions; --hf-overrides can lengthen it"
        )
    return Rotation(table, interleaved=not rotary.is_neox_style)


def _factors(rotary: nn.Module) -> list[float]:
    """Returns the factors of linear scaling, each with its own part of the table; one factor for other embeddings."""
    return list(getattr(rotary, "scaling_factors", [1.0]))


def _is_one_of(module: nn.Module, package: str, names: tuple[str, ...]) -> bool:
    """Returns whether a module's class is one of the named classes of a package. Derived classes do not count."""
    kind = type(module)
    return kind.__module__.startswith(f"{package}.") and kind.__name__ in names


def _refused(got: str, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"{KEY}.compaction.positions: got {got}, allowed: {allowed}")
