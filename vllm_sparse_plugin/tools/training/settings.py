"""The settings of a training run, and what follows from them at each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from vllm_sparse_plugin.config.messages import allowed_by
from vllm_sparse_plugin.errors import ConfigurationError, choices
from vllm_sparse_plugin.policies.base import Section

_LEAST_RATE = 0.01
"""What is left of the learning rate at the end."""

LOSS_OF_THE_TEXT: dict[str, Any] = {
    "dense_prompts": False, "distillation": 0.0, "retention": 0.0, "selection_loss": 0.0, "kept_share": 0.0
}  # fmt: skip
"""Settings with which every token is decoded and the loss is that of the text, as the paper trains."""


class TrainingSettings(Section):
    """How to train."""

    steps: Annotated[int, Field(ge=1, le=10**7)] = 200
    """Updates of the weights."""
    hard_steps: Annotated[int | None, Field(ge=0, le=10**7)] = None
    """Of them the last ones, which attend to exactly the pages that serving reads; None for all."""
    sequence_tokens: Annotated[int, Field(ge=16, le=1 << 24)] = 8192
    """Tokens of a row of packed documents; documents that are longer are cut."""
    rows_per_step: Annotated[int, Field(ge=1, le=1 << 16)] = 8
    """Rows of an update on each device, one after the other."""
    learning_rate: Annotated[float, Field(ge=1e-8, le=1.0)] = 1e-4
    """Rate of AdamW after the warm-up; a cosine takes it to a hundredth."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**6)] = 10
    """Steps in which the rate grows to the whole."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Of AdamW."""
    gradient_clip: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    """Largest norm of the gradient of an update."""
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    """T of the soft mask at the first step, in units of logits: larger is softer."""
    final_temperature: Annotated[float, Field(ge=1e-3, le=1e3)] = 0.5
    """T at the last soft step; between the two it changes by the same factor each step."""
    first_budget_tokens: Annotated[int | None, Field(ge=8, le=1 << 20)] = None
    """Budget of the first step, from which it shrinks to the one that is served over the soft steps; None for the one
    that is served throughout."""
    lora_rank: Annotated[int, Field(ge=0, le=4096)] = 16
    """Rank of the updates of attention and MLP; 0 trains all weights."""
    lora_alpha: Annotated[int, Field(ge=1, le=10**4)] = 32
    """Scale of those updates, over the rank."""
    distillation: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Share of the loss that is the divergence from the dense model before training; the rest is the loss of the
    text."""
    retention: Annotated[float, Field(ge=0.0, le=1e3)] = 4.0
    """Weight of that divergence's mean over all tokens of a row, prompts included, which is added to the loss."""
    dense_prompts: Annotated[bool, "true or false"] = True
    """Whether prompts attend densely, as they are prefilled, and only what follows them under the mask."""
    decoded_tokens: Annotated[int, Field(ge=1, le=1 << 24)] = 1024
    """With dense prompts: of a text without a prompt its last tokens, so many and half of them at most, follow what
    counts as one; of a text that is longer than a row, those of each piece."""
    straight_through: Annotated[bool, "true or false"] = False
    """Whether what follows dense prompts attends under the hard mask in the soft steps, too, whose gradients are those
    of the soft mask."""
    selection_loss: Annotated[float, Field(ge=0.0, le=1e3)] = 4.0
    """Weight of the divergence of the pages' scores from what the dense model before training reads of each page, the
    mean over what follows dense prompts, layers and KV heads, which is added to the loss; 0 without dense prompts."""
    kept_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Share of the weights before training in what is written, an average of both; of updates of low rank, how much is
    left out. It takes part in no step: a run that is over writes its model again with another share."""
    gradient_checkpointing: Annotated[bool, "true or false"] = True
    """Whether activations are computed again in the backward pass, not kept."""
    measure_every: Annotated[int, Field(ge=1, le=10**7)] = 25
    """Steps between measurements on a row that is not trained on: its loss under the served selection and dense."""
    save_every: Annotated[int, Field(ge=1, le=10**7)] = 50
    """Steps after which a run that is killed can go on."""
    seed: Annotated[int, Field(ge=0, le=(1 << 32) - 1)] = 0
    """Of the order of documents and of the new weights of LoRA."""

    @model_validator(mode="before")
    @classmethod
    def _no_scores_learn_without_dense_prompts(cls, values: Any) -> Any:
        """Takes the default of the loss of scores away where it has no place."""
        if isinstance(values, Mapping) and values.get("dense_prompts") is False:
            return {"selection_loss": 0.0, **values}
        return values

    @model_validator(mode="after")
    def _hard_steps_are_some_of_all(self) -> Self:
        if self.hard_steps is not None and self.hard_steps > self.steps:
            raise PydanticCustomError(
                "sentence",
                "hard_steps: got {got}, allowed: up to the {steps} steps",
                {"got": self.hard_steps, "steps": self.steps},
            )
        return self

    @model_validator(mode="after")
    def _some_settings_are_about_what_follows_prompts(self) -> Self:
        if self.straight_through and not self.dense_prompts:
            raise PydanticCustomError("sentence", "straight_through: got true, allowed: with dense_prompts")
        if self.selection_loss and not self.dense_prompts:
            raise PydanticCustomError(
                "sentence", "selection_loss: got {got}, allowed: with dense_prompts", {"got": self.selection_loss}
            )
        return self

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss compares with the dense model before training."""
        return bool(self.distillation or self.retention or self.selection_loss)


class Step(NamedTuple):
    """What a step is trained with."""

    rate: float
    """The learning rate."""
    temperature: float | None
    """T, None for the hard mask."""
    budget_tokens: int
    """Of the mask."""


def parse_settings(values: Mapping[str, Any]) -> TrainingSettings:
    """Returns valid settings.

    Raises:
        ConfigurationError: names the setting, what it got and what is allowed.
    """
    try:
        return TrainingSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
    if first["type"] == "sentence":
        raise ConfigurationError(f"settings.{first['msg']}")
    name, fields = str(first["loc"][0]), TrainingSettings.model_fields
    allowed = allowed_by(fields[name]) if name in fields else choices(fields)
    got = repr(first["input"]) if name in fields else "unknown key"
    raise ConfigurationError(f"settings.{name}: got {got}, allowed: {allowed}")


def step_at(settings: TrainingSettings, step: int, budget_tokens: int, page_size: int) -> Step:
    """Returns what a step is trained with.

    Args:
        settings: of the run.
        step: from 0.
        budget_tokens: that is served.
        page_size: budgets are multiples of it.
    """
    warm = min(1.0, (step + 1) / (settings.warmup_steps + 1))
    cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    rate = settings.learning_rate * warm * (_LEAST_RATE + (1 - _LEAST_RATE) * cosine)
    soft_steps = 0 if settings.hard_steps is None else settings.steps - settings.hard_steps
    if step >= soft_steps:
        return Step(rate, None, budget_tokens)
    progress = step / max(soft_steps - 1, 1)
    temperature = settings.temperature * (settings.final_temperature / settings.temperature) ** progress
    first = max(settings.first_budget_tokens or budget_tokens, budget_tokens)
    budget = first * (budget_tokens / first) ** progress
    return Step(rate, temperature, max(round(budget / page_size) * page_size, budget_tokens))
