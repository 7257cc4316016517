"""A small training run of the tiny Llama: a tokenizer, settings and rows of random tokens."""

from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from vllm_sparse_plugin.config import resolve, section_of
from vllm_sparse_plugin.tools.training.attention import ServedSelection
from vllm_sparse_plugin.tools.training.data import Document, Row, pack
from vllm_sparse_plugin.tools.training.settings import LOSS_OF_THE_TEXT, TrainingSettings
from vllm_sparse_plugin.tools.training.trainer import Run

TOKENIZER = SimpleNamespace(
    eos_token_id=1, encode=lambda text, add_special_tokens=True: [ord(c) % 97 for c in text],
    save_pretrained=lambda folder: None,
)  # fmt: skip
SETTINGS = TrainingSettings(
    steps=4, hard_steps=1, sequence_tokens=64, rows_per_step=2, learning_rate=1e-2, warmup_steps=0, lora_rank=2,
    save_every=2, measure_every=4, **(LOSS_OF_THE_TEXT | {"distillation": 0.5}),
)  # fmt: skip
SELECTION = {"page_size": 8, "budget_tokens": 24, "statistics": "int8"}
CONFIG = resolve({"selection": SELECTION, "min_context_tokens": 0}, "unique")


def run_of(model: Path, output: Path, settings: TrainingSettings = SETTINGS) -> Run:
    return Run(model, output, ServedSelection.of(CONFIG), section_of(CONFIG), settings)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def rows() -> list[Row]:
    drawn = torch.randint(2, 97, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    lengths = [64, 30, 34, 50, 64, 7, 40, 64, 64]
    return pack([Document(part, 0) for part in split(drawn, lengths)], 64, seed=0)


def split(tokens: list[int], lengths: list[int]) -> list[list[int]]:
    return [tokens[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(lengths))]
