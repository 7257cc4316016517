"""Results of the arms of a training study: a value for each text or question, by arm and budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.common.results import Row
from vllm_sparse_plugin.tools.eval.statistics import Estimate, estimate_amount

BEFORE = "before"
"""The arm that is not trained."""
PLAIN, SIGNED = "{:.3f}", "{:+.3f}"
"""Forms of a value and of a difference."""
RECIPE_HEADINGS = ("rank", "rate", "steps", "budget", "RULER", "nats of text, minus dense before")
"""Columns of `recipe_lines`."""
QUESTIONS, TEXT = "questions", "text"
"""Parts of a result: scores of questions, and losses of the ends of texts."""


class Cell(NamedTuple):
    """What was measured."""

    arm: str
    lora_rank: int
    """0 for all weights, and for the model before training."""
    budget_tokens: int | None
    """None for dense attention."""


class Recipe(NamedTuple):
    """Settings of a training. The names are those of `TrainingSettings`."""

    lora_rank: int
    learning_rate: float
    steps: int


Items = dict[Cell, list[float]]
"""A value for each text or question, mean over seeds."""


def questions(rows: Sequence[Row]) -> Items:
    """Return the score of each question."""
    return _items(rows, QUESTIONS, "scores", ("context_tokens", "task"))


def losses(rows: Sequence[Row]) -> Items:
    """Return the loss of each text beyond the loss of dense attention before training, in nats."""
    found = _items(rows, TEXT, "losses", ("text",))
    before = found[Cell(BEFORE, 0, None)]
    return {cell: [loss - first for loss, first in zip(values, before, strict=True)] for cell, values in found.items()}


def changes(rows: Sequence[Row]) -> Items:
    """Return the share of each text's tokens that differ from dense attention before training, beyond its own noise."""
    found = _items(rows, TEXT, "same_as_before", ("text",))
    noise = _items(rows, "noise", "same_as_before", ("text",))[Cell(BEFORE, 0, None)]
    return {cell: [first - same for first, same in zip(noise, values, strict=True)] for cell, values in found.items()}


def recipe_of(row: Row) -> Recipe | str:
    """Return the recipe of a row of results; `BEFORE` without training."""
    return BEFORE if row["arm"] == BEFORE else Recipe(row["lora_rank"], row["learning_rate"], row["steps"])


def by_recipe(rows: Sequence[Row]) -> dict[Recipe | str, list[Row]]:
    """Return the measured rows of each recipe."""
    found: dict[Recipe | str, list[Row]] = {}
    for row in rows:
        if row.get("part"):
            found.setdefault(recipe_of(row), []).append(row)
    return found


def recipe_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Return the quality of each recipe, with the columns of `RECIPE_HEADINGS`."""
    recipes, lines = by_recipe(rows), []
    for recipe, measured in recipes.items():
        found = (questions(measured), PLAIN), (losses([*recipes.get(BEFORE, []), *measured]), SIGNED)
        names = ["before", "", ""] if isinstance(recipe, str) else [str(each) for each in recipe]
        for cell in dict.fromkeys(cell for cell in found[1][0] if (cell.arm == BEFORE) == (recipe == BEFORE)):
            budget = "dense" if cell.budget_tokens is None else str(cell.budget_tokens)
            lines.append([*names, budget, *(mean_text(items.get(cell), form) for items, form in found)])
    return lines


def mean_text(values: list[float] | None, form: str) -> str:
    """Return the mean of values and its interval, each in a form such as `PLAIN`; empty without values."""
    return estimate_text(estimate_amount(values), form) if values else ""


def estimate_text(found: Estimate, form: str) -> str:
    """Return a value and its interval, each in a form such as `PLAIN`."""
    return f"{form.format(found.value)} [{form.format(found.low)}, {form.format(found.high)}]"


def weights_text(lora_rank: int) -> str:
    """Return what was trained."""
    return f"rank {lora_rank}" if lora_rank else "all"


def _items(rows: Sequence[Row], part: str, column: str, names: tuple[str, ...]) -> Items:
    """Return the values of a part, in the order of the columns that name groups of items."""
    by_seed: dict[Cell, dict[int, dict[tuple[object, ...], list[float]]]] = {}
    for row in rows:
        if row.get("part") == part:
            rank = 0 if row["arm"] == BEFORE else row["lora_rank"]
            groups = by_seed.setdefault(Cell(row["arm"], rank, row.get("budget_tokens")), {})
            groups.setdefault(row["seed"], {})[tuple(row[name] for name in names)] = row[column]
    found = {}
    for cell, seeds in by_seed.items():
        joined = [[value for group in sorted(groups) for value in groups[group]] for groups in seeds.values()]
        found[cell] = [sum(values) / len(values) for values in zip(*joined, strict=True)]
    return found
