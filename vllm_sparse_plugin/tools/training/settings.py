"""The settings of a training run, and the values of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field, ValidationError, model_validator

from vllm_sparse_plugin.config.messages import allowed_by
from vllm_sparse_plugin.errors import ConfigurationError, choices
from vllm_sparse_plugin.policies.base import Section

_LEAST_RATE = 0.01
"""Final learning rate, as a share of the peak."""
LOSS_OF_THE_TEXT: dict[str, Any] = {
    "dense_prompts": False, "distillation": 0.0, "retention": 0.0, "selection_loss": 0.0, "kept_share": 0.0
}  # fmt: skip
"""Settings of the paper's training: every token is decoded, and the loss is that of the text."""


class TrainingSettings(Section):
    """Training settings."""

    steps: Annotated[int, Field(ge=1, le=10**7)] = 200
    """Weight updates."""
    hard_steps: Annotated[int | None, Field(ge=0, le=10**7)] = None
    """Number of last steps that attend to exactly the pages that serving selects; None for all steps."""
    sequence_tokens: Annotated[int, Field(ge=16, le=1 << 24)] = 8192
    """Tokens of a row of packed documents. Longer documents are cut."""
    rows_per_step: Annotated[int, Field(ge=1, le=1 << 16)] = 8
    """Rows per update on each device."""
    rows_at_once: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    """Rows that go through the model together. With more, a step has fewer launches and needs more memory."""
    equal_rows: Annotated[bool, "true or false"] = False
    """Whether each row has the same part in `distillation` and in the loss of the text, not each learned token. Rows
    with few learned tokens, such as short answers beside texts, then count as much as others."""
    learning_rate: Annotated[float | None, Field(ge=1e-8, le=1.0)] = None
    """Peak learning rate of AdamW; None for 1e-3 with low-rank updates and 3e-4 with all weights. A cosine decays it to
    1 %."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**6)] = 10
    """Steps in which the learning rate grows to its peak."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Weight decay of AdamW."""
    gradient_clip: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    """Largest gradient norm of an update."""
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    """T of the soft mask at the first step, in units of logits. A larger T is softer."""
    final_temperature: Annotated[float, Field(ge=1e-3, le=1e3)] = 0.5
    """T at the last soft step. T changes by a constant factor per step."""
    first_budget_tokens: Annotated[int | None, Field(ge=8, le=1 << 20)] = None
    """Budget of the first step. It shrinks to the served budget over the soft steps. None for the served budget in all
    steps."""
    lora_rank: Annotated[int, Field(ge=0, le=4096)] = 16
    """Rank of the updates of attention and MLP; 0 trains all weights."""
    lora_alpha: Annotated[int, Field(ge=1, le=10**4)] = 32
    """Scale of the low-rank updates, divided by the rank."""
    distillation: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Share of the loss that is the divergence from the dense model before training. The rest is the loss of the
    text."""
    retention: Annotated[float, Field(ge=0.0, le=1e3)] = 4.0
    """Weight of the mean divergence over all tokens of a row, prompts included. It is added to the loss."""
    dense_prompts: Annotated[bool, "true or false"] = True
    """Whether prompts attend densely, as in a prefill. Only later tokens then attend under the mask."""
    decoded_tokens: Annotated[int, Field(ge=1, le=1 << 24)] = 1024
    """With dense prompts: the number of last tokens of a text without a prompt that are decoded, at most half of the
    text. If a text is longer than a row, this applies to each piece."""
    straight_through: Annotated[bool, "true or false"] = False
    """Whether tokens after dense prompts attend under the hard mask in soft steps, with the gradients of the soft
    mask."""
    selection_loss: Annotated[float, Field(ge=0.0, le=1e3)] = 4.0
    """Weight of the divergence of the pages' scores from the page shares of the dense model before training, mean over
    tokens after dense prompts, layers and KV heads. It is added to the loss. 0 without dense prompts."""
    kept_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Share of the original weights in the written average; for low-rank updates, the share that is left out. No step
    uses it: a finished run can write its model again with another share."""
    gradient_checkpointing: Annotated[bool, "true or false"] = True
    """Whether the backward pass computes activations again instead of keeping them."""
    measure_every: Annotated[int, Field(ge=1, le=10**7)] = 25
    """Steps between measurements on a held-out row: its loss with the served selection and with dense attention."""
    save_every: Annotated[int, Field(ge=1, le=10**7)] = 50
    """Steps between saved states, from which a killed run continues."""
    seed: Annotated[int, Field(ge=0, le=(1 << 32) - 1)] = 0
    """Seed of the document order and of new LoRA weights."""

    @model_validator(mode="before")
    @classmethod
    def _no_scores_learn_without_dense_prompts(cls, values: Any) -> Any:
        """Remove the default of `selection_loss` if prompts are not dense."""
        if isinstance(values, Mapping) and values.get("dense_prompts") is False:
            return {"selection_loss": 0.0, **values}
        return values

    @property
    def peak_rate(self) -> float:
        """The peak learning rate. Its defaults are the best of the study in research/training."""
        default = 1e-3 if self.lora_rank else 3e-4
        return default if self.learning_rate is None else self.learning_rate

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss compares with the dense model before training."""
        return bool(self.distillation or self.retention or self.selection_loss)


class Step(NamedTuple):
    """Values of a step."""

    rate: float
    """The learning rate."""
    temperature: float | None
    """T, None for the hard mask."""
    budget_tokens: int
    """Budget of the mask."""


def parse_settings(values: Mapping[str, Any]) -> TrainingSettings:
    """Return validated settings.

    Raises:
        ConfigurationError: names the setting, the value and what is allowed.
    """
    try:
        settings = TrainingSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name, fields = str(first["loc"][0]), TrainingSettings.model_fields
        allowed = allowed_by(fields[name]) if name in fields else choices(fields)
        got = repr(first["input"]) if name in fields else "unknown key"
        raise ConfigurationError(f"settings.{name}: got {got}, allowed: {allowed}") from None
    with_them = "with dense_prompts"
    for name, is_refused, allowed in (
        ("hard_steps", (settings.hard_steps or 0) > settings.steps, f"up to the {settings.steps} steps"),
        ("rows_at_once", settings.equal_rows and settings.rows_at_once > 1, "1 with equal_rows"),
        ("straight_through", settings.straight_through and not settings.dense_prompts, with_them),
        ("selection_loss", settings.selection_loss and not settings.dense_prompts, with_them),
    ):
        if is_refused:
            raise ConfigurationError(f"settings.{name}: got {getattr(settings, name)!r}, allowed: {allowed}")
    return settings


def step_at(settings: TrainingSettings, step: int, budget_tokens: int, page_size: int) -> Step:
    """Return the values of a step.

    Args:
        settings: of the run.
        step: from 0.
        budget_tokens: the served budget.
        page_size: budgets are multiples of it.
    """
    warm = min(1.0, (step + 1) / (settings.warmup_steps + 1))
    cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    rate = settings.peak_rate * warm * (_LEAST_RATE + (1 - _LEAST_RATE) * cosine)
    soft_steps = 0 if settings.hard_steps is None else settings.steps - settings.hard_steps
    if step >= soft_steps:
        return Step(rate, None, budget_tokens)
    progress = step / max(soft_steps - 1, 1)
    temperature = settings.temperature * (settings.final_temperature / settings.temperature) ** progress
    first = max(settings.first_budget_tokens or budget_tokens, budget_tokens)
    budget = first * (budget_tokens / first) ** progress
    return Step(rate, temperature, max(round(budget / page_size) * page_size, budget_tokens))
