"""The page of results: everything in it comes from the result files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.models import NEEDLE_8M
from bench.common.pages import Block, fill, source_line, table
from bench.common.results import RESULTS, Run, read_run
from research.study.data import Cell, compare
from research.study.documents import TEXT
from research.training.measure import ARMS, BEFORE, DENSE, HARD, SOFT, SOFT_HARD, settings
from vllm_sparse_plugin.tools.eval.statistics import Difference, estimate_difference
from vllm_sparse_plugin.tools.training.settings import LOSS_OF_THE_TEXT, TrainingSettings

RESULT_FILES = sorted(RESULTS.glob("*/training/*.jsonl"))
KEPT_FILES = sorted(RESULTS.glob("*/training-kept/*.jsonl"))
"""Of runs that wrote their models with several shares of the weights before training; the other shares of a run are
among `RESULT_FILES`."""
PAGE = Path(__file__).parent / "README.md"
GENERATOR = "research.training"
NAMES = {BEFORE: "before", DENSE: "no mask", SOFT: "soft mask", HARD: "hard mask", SOFT_HARD: "soft, then hard"}
_UNMEASURED = "-"
"""In place of what was not asked for."""


@dataclass(frozen=True)
class Trained:
    """What one way of training came to."""

    file: Path
    run: Run
    cells: dict[str, Cell]
    """By the name of the setting that it was asked with."""

    @property
    def name(self) -> str:
        """How it was trained, and for which budget; other settings can differ where names are the same."""
        about, rank = self.run.about, self.settings["lora_rank"]
        if about["arm"] in (BEFORE, DENSE):
            return NAMES[about["arm"]]
        updates = f", updates of rank {rank}" if rank else ""
        return f"{NAMES[about['arm']]}, {about['budget_tokens']} tokens{updates}"

    @property
    def settings(self) -> dict[str, Any]:
        """Of its training; what its file does not know had not been invented."""
        chosen: dict[str, Any] = self.run.about.get("training", {})
        return dict.fromkeys(TrainingSettings.model_fields, False) | LOSS_OF_THE_TEXT | chosen

    @property
    def place(self) -> tuple[int, int]:
        """Its place in tables."""
        return ARMS.index(self.run.about["arm"]), -int(self.run.about.get("budget_tokens", 0))


def read_trained(file: Path) -> Trained:
    """Returns what a file of `run` says."""
    run = read_run(file)
    cells: dict[str, Cell] = {}
    for row in run.rows:
        cell = cells.setdefault(row["setting"], Cell(row["setting"], 0))
        name = row["document"].removeprefix(f"{TEXT}-")
        if "loss" in row:
            cell.loss[name] = row["loss"]
        else:
            cell.right[name] = row["right"]
    return Trained(file, run, cells)


def labels(files: Sequence[Trained]) -> list[str]:
    """Returns what files are called in tables: their names, and where those are the same the settings that differ."""
    found = []
    for file in files:
        named_alike = [each.settings for each in files if each.name == file.name]
        differing = [name for name in file.settings if any(each[name] != file.settings[name] for each in named_alike)]
        found.append(", ".join([file.name, *(f"`{name}` {json.dumps(file.settings[name])}" for name in differing)]))
    return found


def _answers(label: str, trained: Trained, dense: Cell) -> list[list[str]]:
    accuracies, shares = [label, "right"], ["", "of dense before"]
    for setting in settings():
        cell = trained.cells.get(setting.name)
        if cell is None:
            accuracies.append(_UNMEASURED)
            shares.append(_UNMEASURED)
            continue
        low, high = cell.interval
        accuracies.append(f"{cell.accuracy:.3f} ({low:.3f}-{high:.3f})")
        found = compare(cell, dense)
        low, high = found.ratio_interval
        shares.append(f"{found.ratio:.3f} ({low:.3f}-{high:.3f})")
    return [accuracies, shares]


def _text(label: str, trained: Trained, dense: Cell) -> list[str]:
    cells = [label]
    for setting in settings():
        if setting.name not in trained.cells:
            cells.append(_UNMEASURED)
            continue
        before = sum(dense.loss.values()) / len(dense.loss)
        found = _lost(trained.cells[setting.name], dense)
        low, high = (math.exp(before + nats) - math.exp(before) for nats in (found.low, found.high))
        cells.append(f"{math.exp(before + found.value):.3f} ({low:+.3f} to {high:+.3f})")
    return cells


def _lost(cell: Cell, dense: Cell) -> Difference:
    """Nats that a token of text loses beside dense attention before training."""
    names = sorted(dense.loss)
    return estimate_difference(*([each.loss[name] for name in names] for each in (dense, cell)))


def _tables(files: Sequence[Trained]) -> str:
    model = files[0].run.about["model"]
    ordered = sorted(files, key=lambda each: each.place)
    (before,) = (each for each in files if each.run.about["arm"] == BEFORE)
    dense = before.cells[settings()[0].name]
    named = list(zip(labels(ordered), ordered, strict=True))
    columns = _columns()
    answers = table(["trained with", "", *columns], [row for each in named for row in _answers(*each, dense)])
    text = table(["trained with", *columns], [_text(*each, dense) for each in named])
    parts = [
        f"## {model}", f"Right answers to {dense.answers} questions, with intervals of 95 %:", answers,
        "Perplexity of text, and how far it is from dense attention before training:", text,
        source_line([each.file for each in ordered]),
    ]  # fmt: skip
    return "\n\n".join(parts)


def kept() -> Block:
    """What a share of the weights before training does to needle-8m, in runs that wrote models with several."""
    own, others = ([read_trained(file) for file in found] for found in (KEPT_FILES, RESULT_FILES))
    runs = [_without_kept_share(file) for file in own]
    files = [*own, *(file for file in others if _without_kept_share(file) in runs)]
    (before,) = (
        each for each in others if each.run.about["model"] == NEEDLE_8M.name and each.run.about["arm"] == BEFORE
    )
    dense, lines = settings()[0].name, []
    for file in sorted(files, key=lambda each: (-each.settings["learning_rate"], each.settings["kept_share"])):
        right = [str(file.cells[setting.name].correct) for setting in settings()]
        nats = _lost(file.cells[dense], before.cells[dense])
        values = [f"{file.settings[name]:g}" for name in ("learning_rate", "steps", "kept_share")]
        lines.append([*values, *right, f"{nats.value:+.4f} ({nats.low:+.4f} to {nats.high:+.4f})"])
    return Block(
        table(["rate", "steps", "kept", *_columns(), "text, dense, nats"], lines), [each.file for each in files]
    )


def _without_kept_share(file: Trained) -> dict[str, Any]:
    """What tells one run from another, whatever share its model was written with."""
    names = ("model", "arm", "budget_tokens", "rows")
    return {**{name: file.run.about.get(name) for name in names}, **file.settings, "kept_share": None}


def _columns() -> list[str]:
    return ["dense" if setting.is_dense else f"{setting.budget_tokens} tokens" for setting in settings()]


def tables() -> str:
    """The tables of every model that was asked, before training at least."""
    models: dict[str, list[Trained]] = {}
    for file in RESULT_FILES:
        trained: Trained = read_trained(file)
        about: dict[str, Any] = trained.run.about
        models.setdefault(about["model"], []).append(trained)
    return "\n\n".join(map(_tables, models.values())) or "Nothing has been measured yet."


def render() -> str:
    """The page with its results as they should be."""
    return fill(PAGE, PAGE.read_text(encoding="utf-8"), [GENERATOR], {"results": lambda: Block(tables()), "kept": kept})
