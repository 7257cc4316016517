"""The page of results: everything in it comes from the result files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.common.pages import Block, fill, source_line, table
from bench.common.results import RESULTS, Run, read_run

RESULT_FILES = [RESULTS / "cpu-2core" / "termination" / f"{model}.jsonl" for model in ("needle-8m", "witness-6m")]
PAGE = Path(__file__).parent / "README.md"
GENERATOR = "research.termination"
_TENTHS = [f"to {10 * n}%" for n in range(1, 11)]


def _sums(rows: Iterable[dict[str, Any]], layer: int | None = None) -> dict[str, float]:
    """Sums over rows, of one layer or of all."""
    total: dict[str, float] = {}
    for row in rows:
        for each in row["layers"] if layer is None else [row["layers"][layer]]:
            for name, value in each.items():
                total[name] = total.get(name, 0) + value
    return total


def _groups(rows: Iterable[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def _ablation(rows: list[dict[str, Any]]) -> str:
    lines = []
    for (order, rule), group in _groups(rows, "order", "rule").items():
        sums = _sums(group)
        right, asked = (sum(row[name] for row in group) for name in ("right", "questions"))
        cells = [
            f"{right}/{asked}",
            f"{sums['share_sum'] / sums['rows']:.1%}",
            f"{sums['error_sum'] / sums['rows']:.2g}",
        ]
        lines.append([order, rule, *cells])
    return table(["order", "rule, tau", "answers right", "blocks read", "mean error of an output"], lines)


def _agreement(groups: dict[tuple[Any, ...], dict[str, float]], headings: list[str]) -> str:
    lines = []
    for key, sums in groups.items():
        decisions, apart = sums["decisions"], sums["apart"]
        offset = "-"
        if apart:
            mean = sums["offset_sum"] / apart
            offset = f"{mean:.2f} ± {math.sqrt(max(0.0, sums['offset_squares'] / apart - mean**2)):.2f}"
        early, late, stopped = (f"{sums[name] / decisions:.2%}" for name in ("early", "late", "stopped"))
        agree = f"{1 - (sums['early'] + sums['late']) / decisions:.2%}"
        lines.append([*map(str, key), f"{decisions:.0f}", agree, early, late, offset, stopped])
    return table([*headings, "n", "agree", "early (FP)", "late (FN)", "blocks apart", "probe stops"], lines)


def _histogram(rows: list[dict[str, Any]]) -> str:
    lines = []
    for layer in range(len(rows[0]["layers"])):
        sums = _sums(rows, layer)
        cells = [f"{sums[name] / sums['rows']:.0%}" for name in _TENTHS]
        lines.append([str(layer), *cells, f"{sums['share_sum'] / sums['rows']:.1%}"])
    return table(["layer", *_TENTHS, "mean"], lines)


def _results(file: Path) -> str:
    run: Run = read_run(file)
    asked = [row for row in run.rows if "rule" in row]
    judged = [row for row in run.rows if "scale" in row]
    paper = min(row["scale"] for row in judged)
    stops = _groups(asked, "order", "rule")
    orders = [order for order in dict.fromkeys(order for order, _ in stops) if "newest" in order]
    whole = [rule for rule in dict.fromkeys(rule for _, rule in stops) if rule.startswith("whole")]
    at_paper = [row for row in judged if row["scale"] == paper]
    by_length = {key: _sums(group) for key, group in _groups(judged, "scale", "context_tokens").items()}
    layers = range(len(judged[0]["layers"]))
    by_layer = {(layer,): _sums(at_paper, layer) for layer in layers}
    parts = [
        f"## {run.about['model']}",
        "### Ablation (the paper's Table 3)",
        _ablation(asked),
        "### Probe and whole output (the paper's Table 4)",
        "By tau and length, all layers:",
        _agreement(by_length, ["tau", "context"]),
        f"By layer, tau {paper:g}, all lengths:",
        _agreement(by_layer, ["layer"]),
        "### How far the layers read",
        *(
            part
            for order in orders
            for rule in whole[:2]
            for part in (f"{order.capitalize()}, rule `{rule}`, share of decisions:", _histogram(stops[order, rule]))
        ),
        source_line([file]),
    ]
    return "\n\n".join(parts)


def render() -> str:
    """The page with its results as they should be."""
    blocks = {"results": lambda: Block("\n\n".join(map(_results, RESULT_FILES)))}
    return fill(PAGE, PAGE.read_text(encoding="utf-8"), [GENERATOR], blocks)
