"""The model of a training run: loaded, with updates of low rank, and written as it will be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml

from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.tools.models import load_causal_lm
from vllm_sparse_plugin.tools.training.settings import TrainingSettings

ADAPTER = "adapter"
"""Folder of the updates alone, in peft's format."""
SECTION = "sparse_attention.yaml"
"""File of the settings that the model was trained with: beside its config.json, which has them too, and beside the
updates, which have no other."""


class HasName(Protocol):
    """An attention function that transformers knows."""

    name: str


def load_model(folder: Path, attention: HasName, dtype: torch.dtype) -> Any:
    """Returns a model of transformers.

    Raises:
        ConfigurationError: if transformers cannot load it, or weights are missing.
    """
    model = load_causal_lm(folder, attention.name, dtype)
    model.config.use_cache = False
    return model


def with_updates(model: Any, settings: TrainingSettings) -> Any:
    """Returns a model whose attention and MLP have trainable updates of low rank; the model itself without them."""
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
    """Writes the trained model with updates merged, in the dtype that it came in, and the updates by themselves.

    What is written is an average with the model before training if the settings keep a share of that.

    Args:
        state: all weights, as the trained model names them.
        source: folder of the model before training.
        attention: what it was loaded with.
        settings: of the run.
        section: what serving takes its settings from.
        tokenizer: of the model.
        output: where to write.
    """
    model = with_updates(load_model(source, attention, torch.float32), settings)
    model.load_state_dict(_averaged(state, model.state_dict(), settings))
    if settings.lora_rank:
        model.save_pretrained(output / ADAPTER)
        model = model.merge_and_unload()
    dtype = json.loads((source / "config.json").read_text(encoding="utf-8")).get("dtype", "bfloat16")
    model = model.to(getattr(torch, dtype))
    setattr(model.config, KEY, section)
    model.config.use_cache = True
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    text = yaml.safe_dump(section, sort_keys=False)
    for folder in (output, output / ADAPTER) if settings.lora_rank else (output,):
        (folder / SECTION).write_text(f"# What this model was trained with.\n{text}", encoding="utf-8")


def _averaged(
    state: dict[str, torch.Tensor], before: dict[str, torch.Tensor], settings: TrainingSettings
) -> dict[str, torch.Tensor]:
    """Returns the weights between those after training and those before, as much of the latter as is kept.

    An update of low rank is a product, of which the second factor is zero before training: averaging that one alone
    averages the product. Everything else is then as it was before.
    """
    if not settings.kept_share:
        return state
    averaged = [name for name in state if not settings.lora_rank or "lora_B" in name]
    return state | {
        name: torch.lerp(state[name].float().cpu(), before[name].float(), settings.kept_share) for name in averaged
    }
