"""Tables of the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table

from research.real import adaptive
from research.real.answers import DENSE
from research.real.prefill import NOISE, SCORED
from research.real.rules import RULES
from research.real.selection import COPIES, LEVELS, LOSS
from vllm_sparse_plugin.tools.eval.statistics import estimate_excess, estimate_mean, estimate_ratio

Rows = Sequence[dict[str, Any]]


def tables(rows: Rows) -> Iterator[Table]:
    """Yield a table for each study in the rows."""
    makers: dict[str, Callable[[Rows], list[Table]]] = {
        "answers": _answers, "prefill": _prefill, "routing": _routing, "pages": _pages, "decode": _decode,
        "reuse": _reuse, "sinks": _sinks, "selection": _selection, "adaptive": _adaptive,
        "contributions": _contributions,
    }  # fmt: skip
    for study, make in makers.items():
        found = [row for row in rows if row.get("study") == study]
        if found:
            yield from make(found)


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
        share = estimate_ratio([row["score"] for row in group], [dense[row["name"]] for row in group])
        survived = [row["survive"] for row in group if "survive" in row]
        needs = RULES[arm].serves.partition(":")[0] if arm in RULES else ""
        of_task = [_mean(row["score"] for row in group if row["task"] == task) for task in tasks]
        line = [
            arm, str(ratio), f"{_mean(row['kept'] for row in group):.3f}",
            f"{_mean(row['score'] for row in group):.3f}",
            f"{share.value:.2f}",
            f"{share.low:.2f}-{share.high:.2f}", f"{_mean(survived):.3f}" if survived else "", needs,
            *(f"{value:.2f}" for value in of_task),
        ]  # fmt: skip
        lines.append((-ratio, -share.value, line))
    for _, _, line in sorted(lines, key=lambda each: each[:2]):
        table.add_row(*line)
    return [table]


def _prefill(rows: Rows) -> list[Table]:
    table = Table(title="Prefill with important tokens")
    columns = ("agreement", "of noise", "95 %", "within", "kept", "attention_flops", "flops")
    for column in ("arm", "kind", "context", *columns):
        table.add_column(column, no_wrap=True)
    for every in (True, False):
        of = _groups(rows, "arm") if every else _groups(rows, "arm", "kind", "context_tokens")
        for key, group in of.items():
            arm, kind, context = key if len(key) == 3 else (key[0], "all", "")
            share = estimate_ratio(*_beside_noise(rows, group))
            rest = [f"{_mean(row[name] for row in group):.3f}" if name in group[0] else "" for name in columns[3:]]
            table.add_row(
                arm, kind, str(context), f"{_mean(row['agreement'] for row in group):.3f}", f"{share.value:.3f}",
                f"{share.low:.3f}-{share.high:.3f}", *rest,
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
    columns = {"arm": "arm", "reduce": "group", "pages": "pages", "first_dense": "first dense"}
    return _excess(rows, "Decode from chosen pages", columns)


def _reuse(rows: Rows) -> list[Table]:
    columns = {"arm": "arm", "pages": "pages", "plan": "plan", "anchors": "anchors"}
    return _excess(rows, "Decode from pages of another layer", columns)


def _excess(rows: Rows, title: str, columns: dict[str, str]) -> list[Table]:
    """Return a table for each kind and context: agreement and excess by the columns, which have titles."""
    scored = [row for row in rows if "agreement" in row]
    made = []
    for (kind, context), of_kind in _groups(scored, "kind", "context_tokens").items():
        table = Table(title=f"{title}: {kind}, {context} tokens")
        for column in (*columns.values(), "agreement", "excess", "95 %"):
            table.add_column(column, no_wrap=True)
        for key, group in _groups(of_kind, *columns).items():
            found, noise = _beside_noise(scored, group)
            if not found:
                continue
            excess = estimate_excess(noise, found, SCORED)
            table.add_row(
                *map(str, key), f"{_mean(found):.3f}", f"{excess.value:.3f}", f"{excess.low:.3f} to {excess.high:.3f}",
            )  # fmt: skip
        made.append(table)
    return made


_LAYER_COLUMNS = (
    "mass", "sink_heads", "first_key_norm", "key_norm", "first_value_norm", "value_norm", "query_cosine",
    "first_layer_cosine", "layer_cosine", "sink_write", "other_write", "sink_alignment", "other_alignment",
)  # fmt: skip
_LEVEL_COLUMNS = "queries", "mass", "largest_other", "mean_other", "ratio"


def _sinks(rows: Rows) -> list[Table]:
    made = []
    for title, arm, key, columns in (
        ("First token by layer", "layer", "layer", _LAYER_COLUMNS),
        ("Weights beside the first token", "level", "level", _LEVEL_COLUMNS),
    ):
        table = Table(title=title)
        for column in ("context", key, *columns):
            table.add_column(column, no_wrap=True)
        of_arm = _groups([row for row in rows if row["arm"] == arm], "context_tokens", key)
        for place, group in of_arm.items():
            means = (_mean(row[column] for row in group if column in row) for column in columns)
            table.add_row(*map(str, place), *(f"{mean:.4g}" for mean in means))
        made.append(table)
    table = Table(title="Loss in a window")
    for column in ("context", "arm", "nats"):
        table.add_column(column, no_wrap=True)
    for place, group in _groups([row for row in rows if "nats" in row], "context_tokens", "arm").items():
        table.add_row(*map(str, place), f"{_mean(row['nats'] for row in group):.3f}")
    return [*made, table]


def _contributions(rows: Rows) -> list[Table]:
    columns = "missed", "missed_output", "weight_error", "contribution_error"
    table = Table(title="Best tokens by weight and by contribution")
    for column in ("context", "kind", "tokens", *columns):
        table.add_column(column, no_wrap=True)
    for place, group in _groups(rows, "context_tokens", "kind", "tokens").items():
        table.add_row(*map(str, place), *(f"{_mean(row[column] for row in group):.3f}" for column in columns))
    return [table]


def _selection(rows: Rows) -> list[Table]:
    made = []
    for title, arm, key, columns in (
        ("Loss", LOSS, (), ("nats",)),
        ("Weight in two levels", LEVELS, ("ranked_by", "refined", "pages"), ("scored", "mass", "shared")),
        ("Pages without a copy", COPIES, ("budget_tokens", "multiple", "ways"), ("cold", "steady", "again")),
    ):
        of_arm = [row for row in rows if row.get("arm") == arm]
        table = Table(title=title)
        for column in ("context", "kind", *key, *columns):
            table.add_column(column, no_wrap=True)
        for place, group in _groups(of_arm, "context_tokens", "kind", *key).items():
            table.add_row(*map(str, place), *(f"{_mean(row[column] for row in group):.3f}" for column in columns))
        if of_arm:
            made.append(table)
    return made


def _adaptive(rows: Rows) -> list[Table]:
    """Return what stays by arm and choice, and the adaptive shares by kind of text."""
    dense = {row["text"]: row["score"] for row in rows if row["arm"] == adaptive.DENSE and "score" in row}
    found = [row for row in rows if "kept" in row]
    columns = "kept", "attention_flops", "agreement", "of noise", "95 %", "RULER of dense", "95 %"
    table = Table("arm", "choice", *columns, title="Adaptive and fixed numbers of important tokens")
    for (arm, choice), group in _groups(found, "arm", "choice").items():
        kept = estimate_ratio(*_beside_noise(rows, group))
        asked = [row for row in group if "score" in row]
        right = estimate_ratio([row["score"] for row in asked], [dense[row["text"]] for row in asked])
        means = (f"{_mean(row[name] for row in group):.3f}" for name in columns[:3])
        spans = ((f"{each.value:.3f}", f"{each.low:.3f}-{each.high:.3f}") for each in (kept, right))
        table.add_row(arm, choice, *means, *(cell for pair in spans for cell in pair))
    by_layer = Table("arm", "kind", "task", "kept", "by layer", title="Important tokens by layer")
    free = [row for row in found if row["choice"] == adaptive.ADAPTIVE]
    for (arm, kind, task), group in _groups(free, "arm", "kind", "task").items():
        layers = zip(*(row["kept_by_layer"] for row in group), strict=True)
        shares = " ".join(f"{_mean(layer):.2f}" for layer in layers)
        by_layer.add_row(arm, kind, task, f"{_mean(row['kept'] for row in group):.3f}", shares)
    return [table, by_layer]


def _beside_noise(rows: Rows, group: Rows) -> tuple[list[float], list[float]]:
    """Return the agreements of a group and those of dense attention in float32, which are 1 if nothing has measured
    them. If they are measured for other texts only, the text is left out."""
    noise = {row["text"]: row["agreement"] for row in rows if row["arm"] == NOISE}
    found = [row for row in group if not noise or row["text"] in noise]
    return [row["agreement"] for row in found], [noise.get(row["text"], 1.0) for row in found]


def _mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found) if found else float("nan")
