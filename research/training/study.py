"""What every command of the study measures, and how it trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common.options import parse_sizes
from bench.common.results import Row
from research.real.model import Llama
from research.training import evaluate
from research.training.arms import open_trainer, train
from research.training.data import Data
from vllm_sparse_plugin.config import ResolvedConfig, resolve
from vllm_sparse_plugin.tools.arguments import find_preset, open_tokenizer
from vllm_sparse_plugin.tools.eval.items import Prompter
from vllm_sparse_plugin.tools.models import end_tokens
from vllm_sparse_plugin.tools.training.attention import ServedSelection
from vllm_sparse_plugin.tools.training.settings import TrainingSettings

EVERYTHING = 1 << 20
"""A budget that no row exceeds."""


@dataclass(frozen=True)
class Study:
    """A model before training, its data, and how results are measured."""

    model: Path
    """Folder of the model."""
    data: Data
    tokenizer: Any
    """Of the model."""
    attention_backend: str
    budget_tokens: int
    """Budget to train for."""
    budgets: tuple[int | None, ...]
    """Budgets to measure; the first is dense attention."""
    longest: int
    """Maximum tokens of an answer."""
    at_once: int
    """Questions that are answered at the same time."""
    device: str

    @classmethod
    def open(
        cls, model: Path, data: Data, attention_backend: str, budget_tokens: int, budgets: str, longest: int,
        at_once: int, device: str,
    ) -> Study:  # fmt: skip
        """Return a study.

        Raises:
            ConfigurationError: the backend selects no pages that can be trained, or a budget reads whole prompts.
        """
        measured = (evaluate.DENSE, *parse_sizes("budgets", [budgets]))
        tokenizer = open_tokenizer(model)
        study = cls(
            model, data, tokenizer, attention_backend, budget_tokens, measured, longest, at_once, device
        )  # fmt: skip
        evaluate.check_budgets(data.questions, study.served, measured)
        return study

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that are measured."""
        return torch.bfloat16 if self.device.startswith("cuda") else torch.float32

    def selection(self, budget_tokens: int) -> ResolvedConfig:
        """Return the settings of a budget."""
        return resolve({"selection": {"budget_tokens": budget_tokens}}, find_preset(self.attention_backend))

    @property
    def served(self) -> ServedSelection:
        """The selection that is measured."""
        return ServedSelection.of(self.selection(self.budget_tokens))

    @torch.no_grad()
    def predict(self, weights: Llama) -> list[torch.Tensor]:
        """Return the likeliest tokens of dense attention for each text."""
        return evaluate.dense_tokens(weights, self.data.texts, self.served)

    def measure(self, weights: Llama, before: Sequence[torch.Tensor]) -> Iterator[Row]:
        """Yield the rows of all texts and questions.

        Args:
            weights: the model.
            before: of `predict`, before training.
        """
        prompter = Prompter(self.tokenizer, end_tokens=end_tokens(self.model))
        with torch.no_grad():
            yield from evaluate.measure_texts(weights, self.data.texts, self.served, self.budgets, before)
            yield from evaluate.measure_questions(
                weights, self.data.questions, self.served, self.budgets, prompter.decode, prompter.end_tokens,
                self.longest, self.at_once,
            )  # fmt: skip

    def measure_before(self, weights: Llama, before: Sequence[torch.Tensor]) -> Iterator[Row]:
        """Yield the rows of the model before training, and how far its own rounding moves them. See `measure`."""
        with torch.no_grad():
            exact = Llama.load(self.model, self.device, torch.float32)
            yield from evaluate.measure_noise(before, self.data.texts, self.served, exact)
        yield from self.measure(weights, before)

    def train(
        self, folder: Path, settings: TrainingSettings, is_dense: bool, deadline: float, model: Path | None = None
    ) -> Iterator[Row]:
        """Train, write the model to a folder and yield the rows of the log.

        Args:
            folder: of the trained model. A run in it that ran out of time goes on.
            settings: of the training.
            is_dense: whether no page is hidden.
            deadline: of the monotonic clock.
            model: folder of the model to train, if it is not that of the study.

        Raises:
            OutOfTimeError: the deadline passed.
        """
        from accelerate.state import AcceleratorState

        selection = self.selection(EVERYTHING if is_dense else self.budget_tokens)
        trainer = open_trainer(
            model or self.model, folder, self.data, settings, selection, self.tokenizer, self.device
        )  # fmt: skip
        yield from train(trainer, self.budget_tokens, deadline)
        del trainer
        gc.collect()
        # accelerate keeps one state for the process. The next training may have another precision.
        AcceleratorState._reset_state(reset_partial_state=True)

    def train_and_measure(
        self, folder: Path, settings: TrainingSettings, is_dense: bool, deadline: float, before: Sequence[torch.Tensor]
    ) -> Iterator[Row]:
        """Yield the rows of a training, then those of the trained model. See `train` and `measure`."""
        yield from self.train(folder, settings, is_dense, deadline)
        yield from self.measure(self.load(folder), before)

    def load(self, folder: Path) -> Llama:
        """Load a trained model to measure."""
        return Llama.load(folder, self.device, self.dtype)
