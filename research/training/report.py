"""Tables of the arms, with 95 % intervals over texts and questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from bench.common.arms import (
    BEFORE,
    PLAIN,
    POSITIONS,
    QUESTIONS,
    RECIPE_HEADINGS,
    SIGNED,
    TEXT,
    Cell,
    Items,
    changes,
    longer_parts,
    losses,
    mean_text,
    questions,
    recipe_lines,
    weights_text,
)
from bench.common.results import Row
from research.training.evaluate import SCORED


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables of all arms, `BEFORE` among them, or those of a longer context."""
    if any(row.get("part") == POSITIONS for row in rows):
        return _longer_tables(rows)
    if any("learning_rate" in row and row.get("part") for row in rows):
        return [_grid_table(rows)]
    parts: Mapping[str, tuple[Callable[[Sequence[Row]], Items], str]] = {
        "RULER, mean score of all questions": (questions, PLAIN),
        "Loss of held-out texts, minus dense before training, nats": (losses, SIGNED),
        "Next tokens changed from dense before training, beyond its noise": (changes, SIGNED),
    }
    return [_table(title, items_of(rows), form) for title, (items_of, form) in parts.items()]


def _table(title: str, items: Items, form: str) -> Table:
    budgets = list(dict.fromkeys(cell.budget_tokens for cell in items))
    table = Table("arm", "weights", *("dense" if budget is None else str(budget) for budget in budgets), title=title)
    for arm, rank in dict.fromkeys((cell.arm, cell.lora_rank) for cell in items):
        cells = (mean_text(items.get(Cell(arm, rank, budget)), form) for budget in budgets)
        table.add_row(arm, "" if arm == BEFORE else weights_text(rank), *cells)
    return table


def _grid_table(rows: Sequence[Row]) -> Table:
    """Return the quality of each recipe."""
    table = Table(*RECIPE_HEADINGS, title="Recipes")
    for line in recipe_lines(rows):
        table.add_row(*line)
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
        table.add_row(column, *(mean_text(values.get((arm, column)), PLAIN) for arm in arms))
    return table
