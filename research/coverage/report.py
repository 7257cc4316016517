"""The page of results: everything in it comes from the result files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.common.pages import Block, fill, footnote, table
from bench.common.results import RESULTS, read_run
from vllm_sparse_plugin.eval.statistics import estimate_mean

RESULT_FILES = sorted((RESULTS / "cpu-2core" / "coverage").glob("*.jsonl"))
PAGE = Path(__file__).parent / "README.md"
GENERATOR = "research.coverage"
_FIXED = "fixed"


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _by_document(rows: Iterable[dict[str, Any]], column: str) -> list[float]:
    """Means over layers and questions, of each document: its tokens are not independent."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["document"], []).append(_mean(row[column]))
    return list(map(_mean, found.values()))


def _cells(rows: list[dict[str, Any]], target: float, fixed: bool) -> list[str]:
    got = estimate_mean(_by_document(rows, "mass"))
    off = "" if fixed else f"{got.value - target:+.3f}"
    below = "" if fixed else f"{_mean(_by_document(rows, 'below')):.1%}"
    pages = _mean(_by_document(rows, "pages"))
    return [f"{got.value:.3f} ({got.low:.3f}-{got.high:.3f})", off, below, f"{pages:.0f}"]


def _results(file: Path) -> str:
    run = read_run(file)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in run.rows:
        groups.setdefault((row["what"], row["context_tokens"], row["rule"], row["target"]), []).append(row)
    lines = []
    for (what, context, rule, target), rows in sorted(groups.items(), key=lambda group: (group[0][:2], 0)):
        asked = f"{target:.0f} tokens" if rule == _FIXED else f"{target:g}"
        lines.append([what, f"{context // 1024}K", rule, asked, *_cells(rows, target, rule == _FIXED)])
    headings = ["tokens of", "context", "rule", "asked", "got", "off by", "below by .05", "pages read"]
    return "\n\n".join([f"## {run.about['model']}", table(headings, lines), footnote(file.stem, [file])])


def render() -> str:
    """The page with its results as they should be."""
    blocks = {"results": lambda: Block("\n\n".join(map(_results, RESULT_FILES)))}
    return fill(PAGE, PAGE.read_text(encoding="utf-8"), [GENERATOR], blocks)
