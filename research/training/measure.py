"""Trains a small model one way or another, and asks it the study's questions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.common.console import open_console
from bench.common.models import NEEDLE_8M, load_tokenizer
from research.study.documents import TASKS, TEXT, Document, build_documents
from research.study.pipeline import Decoder
from research.study.run import answer_questions, open_results, read_text
from research.study.scores import Mean
from research.study.settings import Setting
from vllm_sparse_plugin.config import ResolvedConfig, resolve, section_of
from vllm_sparse_plugin.policies import UniqueSelection
from vllm_sparse_plugin.tools.training.attention import ServedSelection
from vllm_sparse_plugin.tools.training.data import Row
from vllm_sparse_plugin.tools.training.settings import LOSS_OF_THE_TEXT, TrainingSettings
from vllm_sparse_plugin.tools.training.trainer import Run, Trainer

PRESET = "unique_paper"
BUDGETS = (512, 256, 128, 64)
FIRST_BUDGET_TOKENS = 512
"""Of the mask's first step."""
BEFORE, DENSE, SOFT, HARD, SOFT_HARD = "before", "dense", "soft", "hard", "soft-hard"
ARMS = (BEFORE, DENSE, SOFT, HARD, SOFT_HARD)
"""The model as it is, trained without a mask, with the soft mask alone, with the hard mask alone, and with the hard
mask in the last steps."""
_HARD_SHARES = {HARD: 1.0, SOFT_HARD: 0.2}
"""Of the steps, how many have the hard mask."""
_OF_THE_HARD_MASK = {"learning_rate": 1e-3, "rows_per_step": 2, "warmup_steps": 20}
"""Settings of the arm whose steps are all hard, which learns from the dense model, as is the default."""


@dataclass(frozen=True)
class Recipe:
    """How a model is trained."""

    arm: str
    """One of `ARMS`."""
    budget_tokens: int
    """That it is trained for."""
    steps: int
    """Updates."""
    context_tokens: int
    """Of a row."""
    others: Mapping[str, Any]
    """Other settings of the training."""

    def settings(self, seed: int) -> TrainingSettings:
        """Returns the settings of the training run."""
        chosen: dict[str, Any] = {
            "lora_rank": 0, "rows_per_step": 4, "learning_rate": 3e-4, "gradient_checkpointing": False,
            "first_budget_tokens": max(FIRST_BUDGET_TOKENS, self.budget_tokens), "save_every": self.steps,
        }  # fmt: skip
        chosen |= _OF_THE_HARD_MASK if self.arm == HARD else LOSS_OF_THE_TEXT
        hard_steps = round(self.steps * _HARD_SHARES.get(self.arm, 0.0))
        own = {"steps": self.steps, "hard_steps": hard_steps, "sequence_tokens": self.context_tokens, "seed": seed}
        return TrainingSettings(**(chosen | own | dict(self.others)))

    def config(self) -> ResolvedConfig:
        """Returns what the model is trained for: all of a row's tokens where there is no mask."""
        budget = 2 * self.context_tokens if self.arm == DENSE else self.budget_tokens
        return resolve({"selection": {"budget_tokens": budget}}, PRESET)


def train(recipe: Recipe, model: Path, output: Path, rows: Sequence[Row], device: str, seed: int) -> None:
    """Trains a model; a run that is over is not trained again.

    Args:
        recipe: how.
        model: folder of the model.
        output: folder of the trained one.
        rows: to train on, the last one to measure.
        device: `cpu` or `cuda`.
        seed: of the order of the rows.
    """
    config = recipe.config()
    run = Run(model, output, ServedSelection.of(config), section_of(config), recipe.settings(seed))
    console = open_console()
    Trainer(run, rows, load_tokenizer(model), device).train(lambda row: console.print(row))


def settings(budgets: Sequence[int] = BUDGETS) -> list[Setting]:
    """Returns what answers are decoded with: everything, and what the preset reads at each budget."""
    selection = resolve(None, PRESET).selection
    assert isinstance(selection, UniqueSelection)
    assert selection.statistics == "bf16"
    score = Mean("bf16", selection.lambda_)
    return [
        Setting(),
        *(Setting(score, selection.page_size, budget, recent_pages=selection.recent_pages) for budget in budgets),
    ]


def measure(
    output: Path,
    about: Mapping[str, Any],
    model: Path,
    documents: Sequence[Document],
    device: str,
    time_limit: float,
    budgets: Sequence[int] = BUDGETS,
) -> bool:
    """Asks a model about documents and reads their newest text, as far as the output does not have it.

    Args:
        output: result file.
        about: describes the run.
        model: folder of the model.
        documents: with their questions.
        device: torch's name.
        time_limit: seconds after which nothing is begun.
        budgets: that it decodes with besides all, in tokens.

    Returns:
        Whether the time was enough.
    """
    end = time.monotonic() + time_limit
    file, done = open_results(output, about)
    decoder = Decoder(model, device)
    with file, Progress(console=open_console()) as progress:
        for document in progress.track(documents, description=about.get("arm", "")):
            lacking = [
                (name, setting, read)
                for setting in settings(budgets)
                for name, read in ((document.name, answer_questions), (f"{TEXT}-{document.name}", read_text))
                if (name, setting.name) not in done
            ]
            if not lacking:
                continue
            if time.monotonic() > end:
                return False
            prefix = decoder.prefill(document.tokens)
            for name, setting, read in lacking:
                row = read(decoder, prefix, document, setting)
                file.write({"document": name, "setting": setting.name} | row)
    return True


def documents_of(context_tokens: int, count: int, seed: int) -> list[Document]:
    """Returns documents with questions, `count` of each of the study's tasks, one task after the other in turn."""
    tokenizer = load_tokenizer(NEEDLE_8M)
    by_task = [build_documents(tokenizer, task, context_tokens, count, seed) for task in TASKS]
    return [document for row in zip(*by_task, strict=True) for document in row]
