"""The page of results: everything in it comes from the result files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.pages import Block, fill, footnote, table
from bench.common.results import RESULTS, Run, read_run
from research.study.data import Cell, compare
from research.study.documents import TEXT
from research.training.measure import ARMS, BEFORE, DENSE, SOFT, SOFT_HARD, settings
from vllm_sparse_plugin.eval.statistics import estimate_difference

RESULT_FILES = sorted((RESULTS / "h200" / "training").glob("*.jsonl"))
PAGE = Path(__file__).parent / "README.md"
GENERATOR = "research.training"
NAMES = {BEFORE: "before", DENSE: "no mask", SOFT: "soft mask", SOFT_HARD: "soft, then hard"}


@dataclass(frozen=True)
class Trained:
    """What one way of training came to."""

    file: Path
    run: Run
    cells: dict[str, Cell]
    """By the name of the setting that it was asked with."""

    @property
    def name(self) -> str:
        """In tables: how it was trained, and for which budget."""
        about = self.run.about
        budget = f", {about['budget_tokens']} tokens" if about["arm"] in (SOFT, SOFT_HARD) else ""
        return NAMES[about["arm"]] + budget

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


def _answers(trained: Trained, dense: Cell) -> list[list[str]]:
    accuracies, shares = [trained.name, "right"], ["", "of dense before"]
    for setting in settings():
        cell = trained.cells[setting.name]
        low, high = cell.interval
        accuracies.append(f"{cell.accuracy:.3f} ({low:.3f}-{high:.3f})")
        found = compare(cell, dense)
        low, high = found.ratio_interval
        shares.append(f"{found.ratio:.3f} ({low:.3f}-{high:.3f})")
    return [accuracies, shares]


def _text(trained: Trained, dense: Cell) -> list[str]:
    cells = [trained.name]
    for setting in settings():
        losses = trained.cells[setting.name].loss
        names = sorted(dense.loss)
        mean, before = (sum(each[name] for name in names) / len(names) for each in (losses, dense.loss))
        found = estimate_difference([dense.loss[name] for name in names], [losses[name] for name in names])
        low, high = (math.exp(before + nats) - math.exp(before) for nats in (found.low, found.high))
        cells.append(f"{math.exp(mean):.3f} ({low:+.3f} to {high:+.3f})")
    return cells


def _tables(files: Sequence[Trained]) -> str:
    model = files[0].run.about["model"]
    ordered = sorted(files, key=lambda each: each.place)
    (before,) = (each for each in files if each.run.about["arm"] == BEFORE)
    dense = before.cells[settings()[0].name]
    columns = ["dense" if setting.is_dense else f"{setting.budget_tokens} tokens" for setting in settings()]
    answers = table(["trained with", "", *columns], [row for each in ordered for row in _answers(each, dense)])
    text = table(["trained with", *columns], [_text(each, dense) for each in ordered])
    parts = [
        f"## {model}", f"Right answers to {dense.answers} questions, with intervals of 95 %:", answers,
        "Perplexity of text, and how far it is from dense attention before training:", text,
        footnote(model, [each.file for each in ordered]),
    ]  # fmt: skip
    return "\n\n".join(parts)


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
    return fill(PAGE, PAGE.read_text(encoding="utf-8"), [GENERATOR], {"results": lambda: Block(tables())})
