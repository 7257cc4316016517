"""A training run of a given time: sequence lengths and learning rate follow the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bench.common.results import ResultFile
from research.witness.data import ANSWER, SOURCES, DocumentPool, Kinds, Tokens, stretches
from research.witness.model import Forward, Loss, save_model

_BETAS = (0.9, 0.95)
_CLIP = 1.0
_FULL_PRICE = 0.2  # of the time: first there must be something to say
_FINAL_RATE = 0.01
_LOG_SECONDS = 10.0
_SAVE_SECONDS = 60.0


class Stage(NamedTuple):
    """A part of the run."""

    length: int
    """Of the sequences, in tokens."""
    share: float
    """Of the time."""


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    stages: tuple[Stage, ...]
    tokens_per_step: int
    tokens_at_once: int
    """Of one forward and backward pass; a step has as many as it needs."""
    text_share: float
    """Of the sequences: plain text; the rest are documents with questions."""
    answer_share: float
    """Of the loss: the mean over answers; the rest is the mean over all other tokens."""
    head_price: float
    """Of the loss: what attention costs that is not on token 0; 0 for none."""
    free_share: float
    """Of the attention: as much that is not on token 0 costs nothing."""
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    seed: int


class Batch(NamedTuple):
    """Sequences of one step."""

    tokens: Tokens
    """`[num_sequences, length + 1]`: each predicts the next."""
    kinds: Kinds
    """The same shape, an index into `SOURCES` each."""

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Predicted tokens by source."""
        return np.bincount(self.kinds[:, 1:].ravel(), minlength=len(SOURCES))


def stage_at(stages: tuple[Stage, ...], progress: float) -> int:
    """The length to train on after a share of the time."""
    end = 0.0
    for stage in stages:
        end += stage.share
        if progress < end:
            return stage.length
    return stages[-1].length


def learning_rate(recipe: Recipe, step: int, progress: float) -> float:
    """A warm-up by steps, a cosine by time to a hundredth of the peak."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return recipe.learning_rate * warm * (_FINAL_RATE + (1 - _FINAL_RATE) * cosine)


def head_price(recipe: Recipe, progress: float) -> float:
    """Linear by time from 0 to the whole price."""
    return recipe.head_price * min(1.0, progress / _FULL_PRICE)


def source_weights(counts: Any, answer_share: float) -> list[float]:
    """What a token of each source weighs in a step's loss.

    Args:
        counts: predicted tokens by source.
        answer_share: see `Recipe`; without answers the rest is everything.
    """
    answers, others = int(counts[ANSWER]), int(sum(counts)) - int(counts[ANSWER])
    share = answer_share if answers and others else float(answers > 0)
    weights = [(1 - share) / max(1, others)] * len(SOURCES)
    weights[ANSWER] = share / max(1, answers)
    return weights


def draw_batch(recipe: Recipe, length: int, stream: Tokens, pool: DocumentPool, rng: np.random.Generator) -> Batch:
    """The sequences of a step, text and documents in turns."""
    count = max(2, recipe.tokens_per_step // length)
    texts = min(count, round(count * recipe.text_share))
    tokens = stretches(stream, length + 1, texts, rng)
    kinds = np.zeros_like(tokens, dtype=np.uint8)
    if texts < count:
        written = pool.take(length + 1, count - texts)
        tokens, kinds = np.concatenate([tokens, written[0]]), np.concatenate([kinds, written[1]])
    order = rng.permutation(count)
    return Batch(tokens[order], kinds[order])


class Trainer:
    """A model, its optimizer and what it has seen."""

    def __init__(self, model: Any, recipe: Recipe, device: str, compiled: bool) -> None:
        self.model = model.to(device).train()
        self.forward = Forward(model, compiled)
        self.steps = self.tokens = self.skipped_steps = 0
        self._recipe = recipe
        self._device = torch.device(device)
        self._at_once = recipe.tokens_at_once
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": recipe.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=recipe.learning_rate,
            betas=_BETAS,
            fused=self._device.type == "cuda",
        )

    def step(self, batch: Batch, rate: float, price: float) -> Loss:
        """Learn from a batch, at a learning rate and a price of speaking."""
        while True:
            self._optimizer.zero_grad(set_to_none=True)
            try:
                loss = self._backward(batch, price)
                break
            except torch.OutOfMemoryError:
                length = batch.tokens.shape[1] - 1
                if self._at_once <= length:
                    raise
                self._at_once //= 2
                print(f"out of memory: {self._at_once} tokens at once from now on", flush=True)
                torch.cuda.empty_cache()
            except Exception as error:
                if not self.forward.compiled:
                    raise
                print(f"torch.compile failed, going on without it: {' '.join(str(error).split())[:500]}", flush=True)
                self.forward.run_eagerly()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        # Also keeps the host from running ahead of the device, whose time the schedule follows.
        if math.isfinite(norm.item()):
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        else:
            self.skipped_steps += 1
        self.steps += 1
        self.tokens += batch.kinds[:, 1:].size
        return loss

    def _backward(self, batch: Batch, price: float) -> Loss:
        weights = torch.tensor(source_weights(batch.counts, self._recipe.answer_share), device=self._device)
        total = _nothing(self._device)
        rows = max(1, self._at_once // (batch.tokens.shape[1] - 1))
        for begin in range(0, len(batch.tokens), rows):
            tokens = torch.from_numpy(batch.tokens[begin : begin + rows].astype(np.int64)).to(self._device)
            kinds = torch.from_numpy(batch.kinds[begin : begin + rows, 1:].copy()).to(self._device)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
                loss = self.forward.loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), kinds)
            part = len(tokens) / len(batch.tokens)
            too_much = (loss.speech - self._recipe.free_share).relu()
            ((loss.sums * weights).sum() + price * part * too_much).backward()
            total = Loss(total.sums + loss.sums.detach(), total.speech + part * loss.speech.detach())
        return total


def _nothing(device: torch.device) -> Loss:
    return Loss(torch.zeros(len(SOURCES), device=device), torch.zeros((), device=device))


def train(
    trainer: Trainer, recipe: Recipe, stream: Tokens, pool: DocumentPool, deadline: float, folder: Path, log: ResultFile
) -> None:
    """Train until the deadline; the folder holds the model of at most a minute ago all the while, and the last one.

    Args:
        trainer: with a model that has seen nothing.
        recipe: how.
        stream: `[num_tokens]` ids of the text.
        pool: of documents of one token more than the stages' lengths.
        deadline: on `time.monotonic()`'s clock.
        folder: where to save.
        log: takes a row every few seconds.
    """
    rng = np.random.default_rng(recipe.seed)
    begin = saved = logged = time.monotonic()
    nothing = _nothing(trainer.model.device)
    total, counts, steps_before, tokens_before = nothing, np.zeros(len(SOURCES), dtype=np.int64), 0, 0
    length = 0
    try:
        while (now := time.monotonic()) < deadline:
            progress = (now - begin) / (deadline - begin)
            if length != stage_at(recipe.stages, progress):
                length = stage_at(recipe.stages, progress)
                print(f"{now - begin:.0f} s: sequences of {length} tokens", flush=True)
            rate = learning_rate(recipe, trainer.steps, progress)
            batch = draw_batch(recipe, length, stream, pool, rng)
            loss = trainer.step(batch, rate, head_price(recipe, progress))
            total = Loss(total.sums + loss.sums, total.speech + loss.speech)
            counts += batch.counts
            now = time.monotonic()
            if now - logged >= _LOG_SECONDS or now >= deadline or trainer.steps == 1:
                row = {
                    "seconds": round(now - begin, 1),
                    "step": trainer.steps,
                    "tokens": trainer.tokens,
                    "length": length,
                    "learning_rate": round(rate, 7),
                    "tokens_per_second": round((trainer.tokens - tokens_before) / (now - logged)),
                    "loss": {
                        name: round(sum_ / count, 4)
                        for name, sum_, count in zip(SOURCES, total.sums.tolist(), counts.tolist(), strict=True)
                        if count
                    },
                    "speech": round(total.speech.item() / (trainer.steps - steps_before), 4),
                }
                log.write(row)
                print(_progress(row), flush=True)
                total, counts, logged = nothing, np.zeros_like(counts), now
                steps_before, tokens_before = trainer.steps, trainer.tokens
            if now - saved >= _SAVE_SECONDS:
                save_model(trainer.model, folder)
                saved = now
    finally:
        save_model(trainer.model, folder)
        log.write(dict(_summary(trainer, time.monotonic() - begin)))


def _progress(row: dict[str, Any]) -> str:
    losses = ", ".join(f"{name} {loss:.3f}" for name, loss in row["loss"].items())
    return (
        f"{row['seconds']:.0f} s, step {row['step']}, {row['tokens'] / 1e6:.1f} M tokens, "
        f"{row['tokens_per_second']:,} tokens/s, lr {row['learning_rate']:.2g}; loss: {losses}; "
        f"speech {row['speech']:.3f}"
    )


def _summary(trainer: Trainer, seconds: float) -> Iterator[tuple[str, Any]]:
    yield "trained_seconds", round(seconds, 1)
    yield "steps", trainer.steps
    yield "tokens", trainer.tokens
    yield "skipped_steps", trainer.skipped_steps
    yield "compiled", trainer.forward.compiled
    if trainer.model.device.type == "cuda":
        yield "gpu_memory_gib", round(torch.cuda.max_memory_allocated() / 2**30, 1)
