"""Tables of the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from research.real.answers import DENSE
from research.real.prefill import NOISE, SCORED
from research.real.rules import RULES
from vllm_sparse_plugin.tools.eval.statistics import estimate_excess, estimate_mean

Rows = Sequence[dict[str, Any]]
_RESAMPLES = 2000


def tables(rows: Rows) -> Iterator[Table]:
    """Yield a table for each study in the rows."""
    makers: dict[str, Callable[[Rows], list[Table]]] = {
        "answers": _answers, "prefill": _prefill, "routing": _routing, "pages": _pages, "decode": _decode,
    }  # fmt: skip
    for study, make in makers.items():
        found = [row for row in rows if row.get("study") == study]
        if found:
            yield from make(found)


def relative(scores: Sequence[float], dense: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of paired scores over that of dense attention, with a 95 % bootstrap interval over questions."""
    pairs = np.array([scores, dense])
    if not pairs[1].any():
        return float("nan"), float("nan"), float("nan")
    drawn = np.random.default_rng(0).integers(len(scores), size=(_RESAMPLES, len(scores)))
    sums = pairs[:, drawn].sum(axis=-1)
    ratios = sums[0][sums[1] > 0] / sums[1][sums[1] > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(pairs[0].sum() / pairs[1].sum()), float(low), float(high)


def _groups(rows: Rows, *columns: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(column, "") for column in columns), []).append(row)
    return found


def _answers(rows: Rows) -> list[Table]:
    scored = [row for row in rows if "score" in row]
    tasks = list(dict.fromkeys(row["task"] for row in scored))
    table = Table(title="RULER after eviction")
    for column in ("arm", "ratio", "kept", "mean", "of dense", "95 %", "heads with all digits", "needs", *tasks):
        table.add_column(column, no_wrap=True)
    dense = {row["name"]: row["score"] for row in scored if row["arm"] == DENSE}
    lines = []
    for (arm, ratio), group in _groups(scored, "arm", "ratio").items():
        share, low, high = relative([row["score"] for row in group], [dense[row["name"]] for row in group])
        survived = [row["survive"] for row in group if "survive" in row]
        needs = RULES[arm].serves.partition(":")[0] if arm in RULES else ""
        of_task = [_mean(row["score"] for row in group if row["task"] == task) for task in tasks]
        line = [
            arm, str(ratio), f"{_mean(row['kept'] for row in group):.3f}",
            f"{_mean(row['score'] for row in group):.3f}",
            f"{share:.2f}", f"{low:.2f}-{high:.2f}", f"{_mean(survived):.3f}" if survived else "", needs,
            *(f"{value:.2f}" for value in of_task),
        ]  # fmt: skip
        lines.append((-ratio, -share, line))
    for _, _, line in sorted(lines, key=lambda each: each[:2]):
        table.add_row(*line)
    return [table]


def _prefill(rows: Rows) -> list[Table]:
    table = Table(title="Prefill with important tokens")
    columns = ("agreement", "of noise", "95 %", "within", "kept", "attention_flops", "flops")
    for column in ("arm", "kind", "context", *columns):
        table.add_column(column, no_wrap=True)
    noise = {row["text"]: row["agreement"] for row in rows if row["arm"] == NOISE}
    for every in (True, False):
        of = _groups(rows, "arm") if every else _groups(rows, "arm", "kind", "context_tokens")
        for key, group in of.items():
            arm, kind, context = key if len(key) == 3 else (key[0], "all", "")
            share, low, high = relative(
                [row["agreement"] for row in group], [noise.get(row["text"], 1.0) for row in group]
            )
            rest = [f"{_mean(row[name] for row in group):.3f}" if name in group[0] else "" for name in columns[3:]]
            table.add_row(
                arm, kind, str(context), f"{_mean(row['agreement'] for row in group):.3f}", f"{share:.3f}",
                f"{low:.3f}-{high:.3f}", *rest,
            )  # fmt: skip
    return [table]


def _routing(rows: Rows) -> list[Table]:
    table = Table(title="Skipped KV groups")
    columns = ("skipped", "sinks", "precision", "recall", "energy")
    for column in ("arm", "share", "agreement", "95 %", *columns):
        table.add_column(column, no_wrap=True)
    groups = _groups(rows, "share", "arm")
    for (share, arm), group in sorted(groups.items(), key=lambda each: str(each[0][0])):
        estimate = estimate_mean([row["agreement"] for row in group], 128)
        rest = [f"{_mean(row[name] for row in group):.3f}" if name in group[0] else "" for name in columns]
        table.add_row(
            arm, str(share), f"{estimate.value:.3f}", f"{estimate.low:.3f}-{estimate.high:.3f}", *rest
        )  # fmt: skip
    return [table]


def _pages(rows: Rows) -> list[Table]:
    scored = [row for row in rows if "mass" in row]
    budgets = sorted({row["pages"] for row in scored})
    made = []
    for (kind, context), of_kind in _groups(scored, "kind", "context_tokens").items():
        table = Table(title=f"Weight of the selected pages: {kind}, {context} tokens")
        for column in ("arm", "group", "bytes", *(f"{budget} pages" for budget in budgets)):
            table.add_column(column, no_wrap=True)
        for (arm, reduce, size), group in _groups(of_kind, "arm", "reduce", "bytes").items():
            values = [f"{_mean(row['mass'] for row in group if row['pages'] == budget):.3f}" for budget in budgets]
            table.add_row(arm, reduce, str(size), *values)
        made.append(table)
    return made


def _decode(rows: Rows) -> list[Table]:
    scored = [row for row in rows if "agreement" in row]
    noise = {row["text"]: row["agreement"] for row in scored if row["arm"] == NOISE}
    made = []
    for (kind, context), of_kind in _groups(scored, "kind", "context_tokens").items():
        table = Table(title=f"Decode from chosen pages: {kind}, {context} tokens")
        for column in ("arm", "group", "pages", "first dense", "agreement", "excess", "95 %"):
            table.add_column(column, no_wrap=True)
        columns = "arm", "reduce", "pages", "first_dense"
        for key, group in _groups(of_kind, *columns).items():
            found = [row["agreement"] for row in group]
            excess = estimate_excess([noise.get(row["text"], 1.0) for row in group], found, SCORED)
            table.add_row(
                *map(str, key), f"{_mean(found):.3f}", f"{excess.value:.3f}", f"{excess.low:.3f} to {excess.high:.3f}",
            )  # fmt: skip
        made.append(table)
    return made


def _mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found) if found else float("nan")
