"""A small training run of the tiny Llama: a tokenizer, settings and rows of random tokens."""

from types import SimpleNamespace

import torch

from vllm_sparse_plugin.tools.training.data import Document, Row, pack
from vllm_sparse_plugin.tools.training.settings import LOSS_OF_THE_TEXT, TrainingSettings

TOKENIZER = SimpleNamespace(
    eos_token_id=1, encode=lambda text, add_special_tokens=True: [ord(c) % 97 for c in text],
    save_pretrained=lambda folder: None,
)  # fmt: skip
SETTINGS = TrainingSettings(
    steps=4, hard_steps=1, sequence_tokens=64, rows_per_step=2, learning_rate=1e-2, warmup_steps=0, lora_rank=2,
    save_every=2, measure_every=4, **(LOSS_OF_THE_TEXT | {"distillation": 0.5}),
)  # fmt: skip


def rows() -> list[Row]:
    drawn = torch.randint(2, 97, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    lengths = [64, 30, 34, 50, 64, 7, 40, 64, 64]
    return pack([Document(part, 0) for part in split(drawn, lengths)], 64, seed=0)


def split(tokens: list[int], lengths: list[int]) -> list[list[int]]:
    return [tokens[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(lengths))]
