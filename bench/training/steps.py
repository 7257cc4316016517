"""Steps of the trainer on a large model shape with random weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sparse_kernels.masked_attention import Packing

from bench.common.models import Model
from vllm_sparse_plugin.config import resolve, section_of
from vllm_sparse_plugin.tools.training.attention import ServedSelection
from vllm_sparse_plugin.tools.training.data import Row
from vllm_sparse_plugin.tools.training.model import HasName, load_model
from vllm_sparse_plugin.tools.training.settings import TrainingSettings
from vllm_sparse_plugin.tools.training.trainer import Run, Trainer

_ROWS = 4
"""Number of rows that steps are trained on repeatedly."""


def draw_rows(vocabulary: int, tokens: int, count: int) -> list[Row]:
    """Returns rows of one document each with random tokens, and one more, which is not trained on."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocabulary, (count + 1, tokens), generator=generator).tolist()
    return [Row(row, [False] + [True] * (tokens - 1), Packing((tokens,)), (0,)) for row in drawn]


def loader_of(model: Model, device: str, layers: int | None) -> Callable[[Path, HasName, torch.dtype], Any]:
    """Returns a function that makes the model: from its checkpoint, or from its shape with random weights on the
    device.

    Args:
        model: see `bench.common.models.open_model`.
        device: torch's name.
        layers: replaces the number of layers of a shape; None to keep it.
    """
    if not model.drawn_weights:
        return load_model

    def draw(folder: Path, attention: HasName, dtype: torch.dtype) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        config: Any = AutoConfig.from_pretrained(folder)
        config.num_hidden_layers = layers or config.num_hidden_layers
        config.use_cache = False
        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention.name, dtype=dtype)

    return draw


@contextmanager
def open_trainer(
    model: Model, settings: TrainingSettings, preset: str, budget_tokens: int, device: str, layers: int | None
) -> Iterator[Trainer]:
    """Yields a trainer in a temporary folder.

    Args:
        model: the model to train.
        settings: of the run.
        preset: of the selection.
        budget_tokens: the budget to train for.
        device: torch's name.
        layers: replaces the number of layers of a shape; None to keep it.
    """
    config = resolve({"selection": {"budget_tokens": budget_tokens}}, preset)
    rows = draw_rows(model.vocabulary, settings.sequence_tokens, _ROWS)
    with tempfile.TemporaryDirectory(prefix="vllm-sparse-") as folder:
        run = Run(model.folder, Path(folder) / "run", ServedSelection.of(config), section_of(config), settings)
        yield Trainer(run, rows, None, device, loader_of(model, device, layers))
