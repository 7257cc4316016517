"""Models of longer contexts: positions that reach further, and the update that makes a trained model from its base.

A form of positions changes config.json alone. The update is one file: low-rank factors in bfloat16, and what changes in
config.json.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bench.common.arms import BEFORE
from research.training.arms import Arm
from vllm_sparse_plugin.config import KEY
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.models import fingerprint, read_config
from vllm_sparse_plugin.tools.training.model import ADAPTER

YARN, NTK, RAISED, TRAINED = "yarn", "ntk", "raised", "trained"
FORMS = (BEFORE, YARN, NTK, RAISED, TRAINED)
"""Arms: the model as it is; YaRN; the smallest base of the NTK rule; the chosen base; the chosen base with training."""
RECIPE = Arm(1, {"distillation": 0.0, "retention": 0.0, "selection_loss": 0.0, "kept_share": 0.0, "equal_rows": True})
"""How `TRAINED` learns: the text, with dense prompts. There is no teacher: no model reads the longer context before."""
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_LONGEST = "max_position_embeddings"
_LAST, _FIRST = ".B", ".A"
"""Ends of the names of an update's factors: `[out, rank]`, which is scaled, and `[rank, in]`."""
_PREFIX = "base_model.model."
"""Of names in a file of peft."""


def positions(config: Mapping[str, Any], context_tokens: int, base: float) -> dict[str, dict[str, Any]]:
    """Return what each form changes in a configuration.

    Args:
        config: of the model before training.
        context_tokens: the context to reach.
        base: of the rotary frequencies in `RAISED` and `TRAINED`.

    Raises:
        ConfigurationError: the model has scaled positions, or reaches the context already.
    """
    rope, longest = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta")}, config[_LONGEST]
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise ConfigurationError("model: got scaled positions, allowed: plain ones")
    if context_tokens <= longest:
        raise ConfigurationError(f"context: got {context_tokens}, allowed: above the model's {longest} tokens")
    factor, old = context_tokens / longest, rope["rope_theta"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    # The slowest frequency turns over the longer context as far as it did over the shorter one.
    smallest = old * factor ** (size / (size - 2))
    yarn = {"rope_type": YARN, "factor": factor, "original_max_position_embeddings": longest, "rope_theta": old}
    ropes = {YARN: yarn, NTK: _plain(smallest), RAISED: _plain(base), TRAINED: _plain(base)}
    return {BEFORE: {}} | {
        name: {_LONGEST: context_tokens, "rope_parameters": each} for name, each in ropes.items()
    }  # fmt: skip


def _plain(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base}


def write_form(model: Path, changes: Mapping[str, Any], output: Path) -> None:
    """Write a model with other positions. The weights are a link.

    Args:
        model: folder of the model before training.
        changes: to its configuration.
        output: folder to write.
    """
    output.mkdir(parents=True, exist_ok=True)
    _copy_others(model, output)
    link = output / _WEIGHTS
    link.unlink(missing_ok=True)
    link.symlink_to((model / _WEIGHTS).resolve())
    _write_config(model, changes, output)


def _copy_others(model: Path, output: Path) -> None:
    """Copy tokenizer and template."""
    for file in model.iterdir():
        if file.is_file() and file.name not in (_CONFIG, _WEIGHTS):
            shutil.copy(file, output)


def _write_config(model: Path, changes: Mapping[str, Any], output: Path) -> None:
    config = read_config(model) | dict(changes)
    if "rope_parameters" in changes:
        config.pop("rope_theta", None)
    (output / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_update(model: Path, trained: Path, output: Path) -> None:
    """Write the update of a model that was trained with low-rank updates.

    Args:
        model: folder of the model before training.
        trained: folder of the trained model, with `ADAPTER`.
        output: file to write.
    """
    from safetensors.torch import load_file, save_file

    adapter = trained / ADAPTER
    about = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    scale = about["lora_alpha"] / about["r"]
    factors = {}
    for name, factor in load_file(adapter / "adapter_model.safetensors").items():
        stem, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".lora_")
        factors[f"{stem}.weight.{part}"] = (factor * (scale if part == "B" else 1)).bfloat16().contiguous()
    before, after = read_config(model), read_config(trained)
    changes = {name: after[name] for name in (_LONGEST, "rope_parameters", KEY) if after.get(name) != before.get(name)}
    save_file(factors, output, {"base": str(fingerprint(model)), "config": json.dumps(changes)})


def apply_update(model: Path, update: Path, output: Path) -> None:
    """Write the trained model: its base plus an update.

    Args:
        model: folder of the model before training.
        update: file of `write_update`.
        output: folder to write.

    Raises:
        ConfigurationError: the update cannot be read, or belongs to another model.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file, save_file

    try:
        with safe_open(update, "pt") as file:
            metadata, factors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        base, changes = metadata["base"], json.loads(metadata["config"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigurationError(f"update: got {update} ({error}), allowed: a file of `longer`") from None
    if base != fingerprint(model):
        raise ConfigurationError(f"model: got {model}, allowed: the model that the update was trained on")
    output.mkdir(parents=True, exist_ok=True)
    _copy_others(model, output)
    weights = load_file(model / _WEIGHTS)
    for name, product in _products(factors):
        weights[name] = (weights[name].float() + product).to(weights[name].dtype)
    save_file(weights, output / _WEIGHTS, {"format": "pt"})
    _write_config(model, changes, output)


def _products(factors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, last in factors.items():
        if name.endswith(_LAST):
            stem = name.removesuffix(_LAST)
            yield stem, last.float() @ factors[stem + _FIRST].float()
