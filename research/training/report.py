"""Tables of the arms, with 95 % intervals over texts and questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from bench.common.arms import BEFORE, Cell, Items, changes, losses, questions, weights_text
from bench.common.results import Row
from vllm_sparse_plugin.tools.eval.statistics import estimate_amount


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables of all arms, `BEFORE` among them."""
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
                found = estimate_amount(values)
                cells.append(form.format(found.value, found.low, found.high))
            else:
                cells.append("")
        table.add_row(arm, "" if arm == BEFORE else weights_text(rank), *cells)
    return table
