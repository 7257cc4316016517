"""Tables of the arms, with 95 % intervals over texts and questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from bench.common.arms import (
    BEFORE,
    POSITIONS,
    QUESTIONS,
    TEXT,
    Cell,
    Items,
    changes,
    longer_parts,
    losses,
    questions,
    weights_text,
)
from bench.common.results import Row
from research.training.evaluate import SCORED
from research.training.grid import recipe_of
from vllm_sparse_plugin.tools.eval.statistics import Estimate, estimate_amount


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables of all arms, `BEFORE` among them, or those of a longer context."""
    if any(row.get("part") == POSITIONS for row in rows):
        return _longer_tables(rows)
    if any("learning_rate" in row and row.get("part") for row in rows):
        return [_grid_table(rows)]
    parts: Mapping[str, tuple[Callable[[Sequence[Row]], Items], str]] = {
        "RULER, mean score of all questions": (questions, "{:.3f} [{:.3f}, {:.3f}]"),
        "Loss of held-out texts, minus dense before training, nats": (losses, "{:+.3f} [{:+.3f}, {:+.3f}]"),
        "Next tokens changed from dense before training, beyond its noise": (changes, "{:+.3f} [{:+.3f}, {:+.3f}]"),
    }
    return [_table(title, items_of(rows), form) for title, (items_of, form) in parts.items()]


def _table(title: str, items: Items, form: str) -> Table:
    budgets = list(dict.fromkeys(cell.budget_tokens for cell in items))
    table = Table("arm", "weights", *("dense" if budget is None else str(budget) for budget in budgets), title=title)
    for arm, rank in dict.fromkeys((cell.arm, cell.lora_rank) for cell in items):
        cells = []
        for budget in budgets:
            if values := items.get(Cell(arm, rank, budget)):
                cells.append(_interval(estimate_amount(values), form))
            else:
                cells.append("")
        table.add_row(arm, "" if arm == BEFORE else weights_text(rank), *cells)
    return table


def _grid_table(rows: Sequence[Row]) -> Table:
    """Return the quality of each recipe."""
    measured = [row for row in rows if row.get("part")]
    before = [row for row in measured if recipe_of(row) == BEFORE]
    table = Table("rank", "rate", "steps", "budget", "RULER", "nats of text, minus dense before", title="Recipes")
    for recipe in dict.fromkeys(map(recipe_of, measured)):
        own = [row for row in measured if recipe_of(row) == recipe]
        found = (questions(own), "{:.3f} [{:.3f}, {:.3f}]"), (losses([*before, *own]), "{:+.3f} [{:+.3f}, {:+.3f}]")
        names = ["before", "", ""] if isinstance(recipe, str) else [str(each) for each in recipe]
        for cell in dict.fromkeys(cell for cell in found[1][0] if (cell.arm == BEFORE) == (recipe == BEFORE)):
            budget = "dense" if cell.budget_tokens is None else str(cell.budget_tokens)
            shown = [_interval(estimate_amount(items[cell]), form) if cell in items else "" for items, form in found]
            table.add_row(*names, budget, *shown)
    return table


def _longer_tables(rows: Sequence[Row]) -> list[Table]:
    """Return RULER by context and budget, and the loss of texts by position and by budget."""
    titles = {
        QUESTIONS: "RULER, mean score, by context and budget",
        POSITIONS: "Loss of texts by position, dense, nats",
        TEXT: f"Loss of the last {SCORED} tokens of texts by budget, nats",
    }
    return [_by_arm(titles[part], values) for part, values in longer_parts(rows).items() if values]


def _by_arm(title: str, values: Mapping[tuple[str, str], list[float]]) -> Table:
    """Return a table with a row for each column, as arms are few and columns many."""
    arms, columns = (list(dict.fromkeys(key[place] for key in values)) for place in (0, 1))
    table = Table("", *arms, title=title)
    for column in columns:
        found = [estimate_amount(values[arm, column]) if (arm, column) in values else None for arm in arms]
        table.add_row(column, *("" if each is None else _interval(each, "{:.3f} [{:.3f}, {:.3f}]") for each in found))
    return table


def _interval(found: Estimate, form: str) -> str:
    return form.format(found.value, found.low, found.high)
