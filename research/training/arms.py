"""The arms: one recipe with several masks, and the trainer's own recipe."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from research.training.data import Data
from vllm_sparse_plugin.config import ResolvedConfig, section_of
from vllm_sparse_plugin.tools.training.attention import ServedSelection
from vllm_sparse_plugin.tools.training.settings import LOSS_OF_THE_TEXT, TrainingSettings, parse_settings
from vllm_sparse_plugin.tools.training.trainer import Run, Trainer

_HARD_SHARE = 5
"""`soft-hard` ends with one of so many steps under the hard mask."""


@dataclass(frozen=True)
class Arm:
    """How an arm differs from the shared recipe."""

    hard_share: float
    """Share of the steps under the hard mask, at the end. The others are under the soft mask."""
    settings: Mapping[str, Any]
    """Of the loss."""
    is_dense: bool = False
    """Whether the mask never hides a page."""


ARMS: dict[str, Arm] = {
    "dense": Arm(1, LOSS_OF_THE_TEXT, is_dense=True),
    "soft": Arm(0, LOSS_OF_THE_TEXT),
    "hard": Arm(1, LOSS_OF_THE_TEXT),
    "soft-hard": Arm(1 / _HARD_SHARE, LOSS_OF_THE_TEXT),
    "taught-hard": Arm(1, {}),
    "taught-soft": Arm(0, {}),
}
"""Arms by name. Those of the paper learn the text, with every token under the mask. `taught` arms learn what the dense
model says, with dense prompts."""


class OutOfTimeError(Exception):
    """The time limit passed during the training."""


def settings_of(arm: Arm, shared: Mapping[str, Any]) -> TrainingSettings:
    """Return the settings of an arm.

    Args:
        arm: the arm.
        shared: settings that all arms have.

    Raises:
        ConfigurationError: a setting is invalid.
    """
    steps = parse_settings(dict(shared)).steps
    return parse_settings({**arm.settings, **shared, "hard_steps": round(arm.hard_share * steps)})


def open_trainer(
    model: Path, output: Path, data: Data, settings: TrainingSettings, selection: ResolvedConfig, tokenizer: Any,
    device: str,
) -> Trainer:  # fmt: skip
    """Return a trainer.

    Args:
        model: folder of the model.
        output: new folder for the trained model.
        data: its rows are trained on.
        settings: of the run.
        selection: to train for.
        tokenizer: of the model.
        device: `cpu` or `cuda`.
    """
    run = Run(model, output, ServedSelection.of(selection), section_of(selection), settings)
    return Trainer(run, data.rows, tokenizer, device)


def train(trainer: Trainer, budget_tokens: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Train, and yield the rows of the log. The model is written at the end.

    Args:
        trainer: of an arm, new or of a run that was out of time.
        budget_tokens: the budget to measure during the training.
        deadline: of the monotonic clock.

    Raises:
        OutOfTimeError: the deadline of the monotonic clock passed. The state is saved.
    """
    settings = trainer.settings
    if not trainer.steps:
        yield trainer.measure(budget_tokens, as_served=True)
    while trainer.steps < settings.steps:
        if time.monotonic() > deadline:
            trainer.save()
            raise OutOfTimeError
        yield trainer.step()
        if trainer.steps == settings.steps or trainer.steps % settings.measure_every == 0:
            yield trainer.measure(budget_tokens, as_served=True)
    trainer.write()
