"""A training run: optional soft steps, then hard steps under the mask. A killed run can continue."""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NoReturn

import torch

from vllm_sparse_plugin.config.fingerprint import fingerprint_of
from vllm_sparse_plugin.errors import ConfigurationError, choices
from vllm_sparse_plugin.tools.files import can_be_made
from vllm_sparse_plugin.tools.training.attention import PackedAttention, ServedSelection, Shares
from vllm_sparse_plugin.tools.training.curves import draw_curves
from vllm_sparse_plugin.tools.training.data import Row, join
from vllm_sparse_plugin.tools.training.loss import Loss, row_loss
from vllm_sparse_plugin.tools.training.model import HasName, load_model, with_updates, write_model
from vllm_sparse_plugin.tools.training.settings import Step, TrainingSettings, step_at

LOG, CURVES = "training.jsonl", "training.png"
"""Files of the output folder besides the model."""
_CHECKPOINTS, _LAST = "checkpoints", "last.json"
_TORCH_WRITER = "PytorchStreamWriter"
"""Name in the errors of torch's files."""
_OTHER = {
    "model": "another base model", "settings": "other settings", "sparse_attention": "another selection",
    "data": "other data",
}  # fmt: skip
"""Words for the parts of `Run.identity`."""
_BETAS = (0.9, 0.95)
Loader = Callable[[Path, HasName, torch.dtype], Any]
"""Loads a transformers model."""


@lru_cache(maxsize=4)
def _order(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


@dataclass(frozen=True)
class Run:
    """The identity of a run. A continued run must have the same identity."""

    model: Path
    """Folder of the model."""
    output: Path
    """Folder of the trained model."""
    served: ServedSelection
    """The selection to train for."""
    section: dict[str, Any]
    """The same selection for config.json."""
    settings: TrainingSettings
    about: dict[str, Any] = field(default_factory=dict)
    """Date and place of the run, for the first line of its log."""
    data: str = ""
    """Digest of the data."""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Values that must not change. The kept share of the original weights may change: it applies when the model is
        written."""
        # The default rate may change between versions, and a run must not continue with another one.
        settings = self.settings.model_dump(exclude={"kept_share"}) | {"learning_rate": self.settings.peak_rate}
        model = fingerprint_of(self.model)
        return {"model": model, "settings": settings, "sparse_attention": self.section, "data": self.data}


class Trainer:
    """A model, its optimizer and its log."""

    def __init__(self, run: Run, rows: Sequence[Row], tokenizer: Any, device: str, load: Loader = load_model) -> None:
        """Load the model, and the state of a killed run.

        Args:
            run: the identity of the run.
            rows: of the data. If there are two or more, the last is measured instead of trained.
            tokenizer: of the model.
            device: `cpu` or `cuda`.
            load: loads a model from a folder, an attention function and a dtype.

        Raises:
            ConfigurationError: transformers cannot load the model, or the folder has another run, is damaged or
                cannot be written.
        """
        from accelerate import Accelerator

        settings = run.settings
        self._run, self._tokenizer = run, tokenizer
        steps = self._saved_steps()
        self._measured = rows[-1]
        self._rows = rows[:-1] if len(rows) > 1 else rows
        # Low-rank updates are float32 beside 16-bit weights. Trained weights are float32, and multiplied in 16 bits.
        on_cpu, all_weights = device == "cpu", settings.lora_rank == 0
        precision = "bf16" if all_weights and not on_cpu else "no"
        self._accelerator: Any = Accelerator(cpu=on_cpu, mixed_precision=precision)
        dtype = torch.float32 if on_cpu or all_weights else torch.bfloat16
        self._attention = PackedAttention(run.served, run.model.name, settings.gradient_checkpointing)
        model = with_updates(load(run.model, self._attention, dtype), settings)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=settings.peak_rate, betas=_BETAS, weight_decay=settings.weight_decay, fused=not on_cpu
        )
        self._model, self._optimizer = self._accelerator.prepare(model, optimizer)
        self._teacher: Any = None
        if settings.needs_teacher and all_weights:
            half = torch.float32 if on_cpu else torch.bfloat16
            self._teacher = load(run.model, self._attention, half).to(self._accelerator.device).eval()
        self.steps = steps
        """Number of completed steps."""
        self.log: list[dict[str, Any]] = []
        """Rows of the log after the first."""
        self._go_on()

    def train(self, report: Callable[[dict[str, Any]], None] = lambda row: None) -> None:
        """Run the remaining steps, then write the model and the plot.

        Args:
            report: receives each row of the log.

        Raises:
            ConfigurationError: the folder cannot be written.
        """
        settings = self._run.settings
        with _refusing(self._run.output):
            if not self.steps:
                self._note(self.measure(), report)
            while self.steps < settings.steps:
                self._note(self.step(), report)
                last = self.steps == settings.steps
                if last or self.steps % settings.measure_every == 0:
                    self._note(self.measure(), report)
                if last or self.steps % settings.save_every == 0:
                    self.save()
            self.write()
            if self.is_main_process:
                draw_curves(self.log, self._run.output / CURVES)

    def write(self) -> None:
        """Write the model. All processes call it."""
        run, state = self._run, self._accelerator.get_state_dict(self._model)
        if self.is_main_process:
            write_model(state, run.model, self._attention, run.settings, run.section, self._tokenizer, run.output)

    def save(self) -> None:
        """Save the state of this step, from which another trainer continues. Delete older states."""
        folder = self._last.parent
        self._accelerator.save_state(str(folder / str(self.steps)), safe_serialization=False)
        self._accelerator.wait_for_everyone()
        if self.is_main_process:
            part = folder / f".{_LAST}"
            part.write_text(json.dumps({"steps": self.steps, "identity": self._run.identity}), encoding="utf-8")
            part.replace(self._last)
            for old in folder.iterdir():
                if old.is_dir() and old.name != str(self.steps):
                    shutil.rmtree(old)
        self._accelerator.wait_for_everyone()

    @property
    def settings(self) -> TrainingSettings:
        """The settings of the run."""
        return self._run.settings

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes files."""
        return bool(self._accelerator.is_main_process)

    @property
    def num_processes(self) -> int:
        """Number of processes that train together."""
        return int(self._accelerator.num_processes)

    def step(self) -> dict[str, Any]:
        """Update the weights once. Return a row of the log."""
        settings, served, begin = self._run.settings, self._run.served, time.monotonic()
        now = step_at(settings, self.steps, served.selection.budget_tokens, served.selection.page_size)
        rows, rows_of_process = self._rows_of(self.steps)
        # Each device adds its part to the mean over the tokens of all devices, and gradients are averaged.
        learned_tokens = sum(sum(row.learned) for row in rows)
        share_of_all = self.num_processes / sum(len(row.tokens) for row in rows)
        share_of_decoded = self.num_processes / max(sum(len(row.tokens) - sum(row.prompts) for row in rows), 1)
        mask = served.mask(now.temperature, now.budget_tokens)
        self._model.train()
        means = torch.zeros(5, device=self._accelerator.device)
        at_once = settings.rows_at_once
        passes = [join(rows_of_process[first : first + at_once]) for first in range(0, len(rows_of_process), at_once)]
        for number, row in enumerate(passes, start=1):
            last = number == len(passes)
            with nullcontext() if last else self._accelerator.no_sync(self._model):
                tokens, learned = self._tensors(row)
                count = len(rows) * sum(row.learned) if settings.equal_rows else learned_tokens
                share = self.num_processes / count
                shares: Shares | None = {} if settings.selection_loss else None
                dense = self._dense_logits(row, tokens, shares) if settings.needs_teacher else None
                with self._attention.using(row.packing, mask, self._prompts(row), settings.straight_through, shares):
                    sums = row_loss(self._logits(row, tokens), tokens, learned, dense)
                    selection = self._attention.selection_loss(tokens.device) * share_of_decoded
                    loss = Loss(sums.text * share, sums.divergence * share, sums.drift * share_of_all)
                    weighted = (1 - settings.distillation) * loss.text + settings.distillation * loss.divergence
                    others = settings.retention * loss.drift + settings.selection_loss * selection
                    objective = weighted + others
                    self._accelerator.backward(objective)
            means += torch.stack([*loss, selection, objective]).detach()
        for group in self._optimizer.param_groups:
            group["lr"] = now.rate
        norm = float(self._accelerator.clip_grad_norm_(self._model.parameters(), settings.gradient_clip))
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        tokens_per_second = sum(len(row.tokens) for row in rows) / (time.monotonic() - begin)
        return self._row_of(now, means, norm, tokens_per_second)

    def _row_of(self, now: Step, means: torch.Tensor, norm: float, tokens_per_second: float) -> dict[str, Any]:
        device = self._accelerator.device
        text, divergence, drift, selection, objective = self._accelerator.reduce(means, reduction="mean").tolist()
        settings = self._run.settings
        compared = {"divergence": round(divergence, 5), "drift": round(drift, 7)}
        return {
            "step": self.steps,
            "objective": round(objective, 5),
            "loss": round(text, 5),
            **(compared if settings.needs_teacher else {}),
            **({"selection_loss": round(selection, 5)} if settings.selection_loss else {}),
            "gradient_norm": round(norm, 4),
            "skipped": not math.isfinite(norm),
            "learning_rate": now.rate,
            "temperature": now.temperature,
            "budget_tokens": now.budget_tokens,
            "tokens_per_second": round(tokens_per_second, 1),
            **(
                {"gpu_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}
                if device.type == "cuda"
                else {}
            ),
        }  # fmt: skip

    def measure(self, budget_tokens: int | None = None, as_served: bool = False) -> dict[str, Any]:
        """Compare the served selection with dense attention on the held-out row. Return a row of the log.

        Args:
            budget_tokens: replaces the served budget.
            as_served: whether prompts attend densely in any training.
        """
        row = self._measured
        tokens, learned = self._tensors(row)
        prompts = row.prompts if as_served else self._prompts(row)
        self._model.eval()
        logits = []
        with torch.no_grad():
            for mask in (None, self._run.served.mask(None, budget_tokens)):
                with self._attention.using(row.packing, mask, prompts):
                    logits.append(self._logits(row, tokens))
            losses = [row_loss(each, tokens, learned, None).text.item() / int(learned.sum()) for each in logits]
        best = [each[:-1].argmax(dim=-1)[learned[1:]] for each in logits]
        return {
            "step": self.steps,
            "dense_loss": round(losses[0], 5),
            "served_loss": round(losses[1], 5),
            "agreement": round((best[0] == best[1]).float().mean().item(), 5),
        }

    def _dense_logits(self, row: Row, tokens: torch.Tensor, shares: Shares | None) -> torch.Tensor:
        """Return the logits of the dense model before training, without gradient. Store its page shares in `shares`."""
        with torch.no_grad(), self._attention.using(row.packing, None, self._prompts(row), shares=shares):
            if self._teacher is not None:
                return self._logits(row, tokens, self._teacher)
            with self._accelerator.unwrap_model(self._model).disable_adapter():
                return self._logits(row, tokens)

    def _prompts(self, row: Row) -> tuple[int, ...] | None:
        """Return the number of densely attending tokens per document; None if all tokens attend under the mask."""
        return row.prompts if self._run.settings.dense_prompts else None

    def _logits(self, row: Row, tokens: torch.Tensor, model: Any = None) -> torch.Tensor:
        positions = torch.cat([torch.arange(length, device=tokens.device) for length in row.packing.lengths])
        logits: torch.Tensor = (model or self._model)(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False
        ).logits[0]
        return logits

    def _tensors(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._accelerator.device
        return torch.tensor(row.tokens, device=device), torch.tensor(row.learned, device=device)

    def _rows_of(self, step: int) -> tuple[list[Row], list[Row]]:
        """Return the rows of a step, of all devices and of this one. The data repeats, each time in another order."""
        per_device, devices = self._run.settings.rows_per_step, self.num_processes
        count, place = len(self._rows), self._accelerator.process_index
        seed, first = self._run.settings.seed, step * per_device * devices
        numbers = range(first, first + per_device * devices)
        rows = [self._rows[_order(count, seed + number // count)[number % count]] for number in numbers]
        return rows, rows[place * per_device : (place + 1) * per_device]

    @property
    def _last(self) -> Path:
        """The file that names the last saved state."""
        return self._run.output / _CHECKPOINTS / _LAST

    def _saved_steps(self) -> int:
        """Return the completed steps of a killed run; 0 for a new run.

        Raises:
            ConfigurationError: the folder has another run or a model of another origin, or cannot be written.
        """
        output = self._run.output
        if not can_be_made(output):
            raise ConfigurationError(
                f"output: got {str(output)!r} (not writable), allowed: a folder that can be written"
            )
        if not self._last.exists():
            if (output / "config.json").exists():
                self._refuse("which has a model already")
            return 0
        try:
            saved = json.loads(self._last.read_text(encoding="utf-8"))
            steps, before = int(saved["steps"]), dict(saved["identity"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._refuse(f"whose {_CHECKPOINTS} cannot be read ({error})")
        now = json.loads(json.dumps(self._run.identity))
        if other := [_OTHER[name] for name in now if before.get(name) != now[name]]:
            raise ConfigurationError(
                f"output: got {str(output)!r}, which has a run with {choices(other)}, allowed: a new folder, or the "
                "same model, settings and data to continue"
            )
        return steps

    def _go_on(self) -> None:
        """Load the state of a killed run and its log, or begin the log of a new one."""
        run, accelerator, path = self._run, self._accelerator, self._run.output / LOG
        if self.steps:
            try:
                accelerator.load_state(str(self._last.parent / str(self.steps)))
            except Exception as error:  # torch and pickle raise errors of many kinds
                reason = " ".join(str(error).split()) or type(error).__name__
                self._refuse(f"whose {_CHECKPOINTS} cannot be read ({reason:.120})")
            self.log = [row for row in _read_log(path) if row["step"] <= self.steps]
        # No process may read a log that is being written.
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            with _refusing(run.output):
                run.output.mkdir(parents=True, exist_ok=True)
                lines = [run.about | {"identity": run.identity, "kept_share": run.settings.kept_share}, *self.log]
                part = path.with_name(f".{LOG}.part")
                part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
                part.replace(path)
        accelerator.wait_for_everyone()

    def _refuse(self, got: str) -> NoReturn:
        raise ConfigurationError(f"output: got {str(self._run.output)!r}, {got}, allowed: a new folder")

    def _note(self, row: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
        self.log.append(row)
        if self.is_main_process:
            with (self._run.output / LOG).open("a", encoding="utf-8") as file:
                print(json.dumps(row), file=file)
            report(row)


def _read_log(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a log, which may be damaged."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else ():
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


@contextmanager
def _refusing(output: Path) -> Iterator[None]:
    """Explain where and why a run cannot be written.

    Raises:
        ConfigurationError: for disk errors, which torch and safetensors report as their own errors.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        is_of_writer = type(error).__module__.partition(".")[0] in ("safetensors", "safetensors_rust")
        if not isinstance(error, OSError) and not is_of_writer and _TORCH_WRITER not in str(error):
            raise
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigurationError(
            f"output: got {str(output)!r} ({reason}), allowed: a folder that can be written"
        ) from None
