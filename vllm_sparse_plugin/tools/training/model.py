"""The model of a training run: loading, low-rank updates, and writing for serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
import yaml

from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.models import keeps_keys_alone, load_causal_lm, name_of, read_config, text_config
from vllm_sparse_plugin.tools.training.settings import TrainingSettings

ADAPTER = "adapter"
"""Folder of the low-rank updates in peft's format."""
SECTION = "sparse_attention.yaml"
"""File with the settings of the training, beside config.json, which also has them, and in the folder of the updates."""


class HasName(Protocol):
    """An attention function registered with transformers."""

    name: str


def load_model(folder: Path, attention: HasName, dtype: torch.dtype) -> Any:
    """Return a transformers model.

    Raises:
        ConfigurationError: transformers cannot load the model, weights are missing, or layers have a state.
    """
    from transformers import DynamicCache

    model = load_causal_lm(folder, attention.name, dtype)
    if not all(map(keeps_keys_alone, DynamicCache(config=model.config).layers)):
        # A state would carry each document of a row into the next.
        raise ConfigurationError(
            f"model: got {name_of(folder)!r} with state-space layers, allowed for training: models without"
        )
    model.config.use_cache = False
    return model


def with_updates(model: Any, settings: TrainingSettings) -> Any:
    """Return the model with trainable low-rank updates of attention and MLP; unchanged if the rank is 0."""
    if not settings.lora_rank:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(settings.seed)
    config = LoraConfig(
        r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def write_model(
    state: dict[str, torch.Tensor],
    source: Path,
    attention: HasName,
    settings: TrainingSettings,
    section: dict[str, Any],
    tokenizer: Any,
    output: Path,
) -> None:
    """Write the trained model with merged updates, in its original dtype, and the updates separately.

    If the settings keep a share of the original weights, the written weights are an average of both.

    Args:
        state: all weights, by the trained model's names.
        source: folder of the model before training.
        attention: the function that the model was loaded with.
        settings: of the run.
        section: settings for serving.
        tokenizer: of the model.
        output: folder to write.
    """
    model = with_updates(load_model(source, attention, torch.float32), settings)
    before = model.state_dict()
    if settings.lora_rank:
        # All other weights are unchanged, but were loaded in 16 bits for the training.
        state = before | {name: weight for name, weight in state.items() if "lora_" in name}
    model.load_state_dict(_averaged(state, before, settings))
    if settings.lora_rank:
        model.save_pretrained(output / ADAPTER)
        model = model.merge_and_unload()
    model = model.to(_dtype_of(source))
    setattr(model.config, KEY, section)
    model.config.use_cache = True
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    text = yaml.safe_dump(section, sort_keys=False)
    for folder in (output, output / ADAPTER) if settings.lora_rank else (output,):
        (folder / SECTION).write_text(f"# Settings that this model was trained with.\n{text}", encoding="utf-8")


def _dtype_of(folder: Path) -> torch.dtype:
    """Return the dtype that a model's config.json names, or that of its language model; bfloat16 if it names none."""
    config = read_config(folder)
    # Older models have the other name.
    names = [part.get(name) for part in (config, text_config(config)) for name in ("dtype", "torch_dtype")]
    found: torch.dtype = getattr(torch, next(filter(None, names), "bfloat16"))
    return found


def _averaged(
    state: dict[str, torch.Tensor], before: dict[str, torch.Tensor], settings: TrainingSettings
) -> dict[str, torch.Tensor]:
    """Return an average of the weights after and before training, by the kept share.

    A low-rank update is a product. Its second factor is zero before training, so scaling this factor averages the
    product. All other weights then equal those before training.
    """
    if not settings.kept_share:
        return state
    averaged = [name for name in state if not settings.lora_rank or "lora_B" in name]
    return state | {
        name: torch.lerp(state[name].float().cpu(), before[name].float(), settings.kept_share) for name in averaged
    }
