"""The page of results: everything in it comes from the result files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.pages import Block, fill, source_line, table
from bench.common.results import RESULTS, Run, read_run
from vllm_sparse_plugin.tools.eval.statistics import estimate_mean

ANSWER_FILES = sorted(RESULTS.glob("*/coverage/answers_*.jsonl"))
RESULT_FILES = sorted(set(RESULTS.glob("*/coverage/*.jsonl")) - set(ANSWER_FILES))
PAGE = Path(__file__).parent / "README.md"
GENERATOR = "research.coverage"
_FIXED, _COVERAGE = "fixed", "coverage"
_ALL = "all"
_EQUAL_PAGES = """## At equal pages read

Questions about documents, decoded from the question on, of which an answer is right or wrong as a whole. "Pages read"
is the mean of complete pages over tokens, layers and KV heads. "Right" has Wilson's 95 % interval, as if the questions
about a document were independent. "Fixed budgets" is the share of right answers on the straight line between the two
fixed budgets that read fewer and more pages; dense attention is the largest of them."""


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
    return "\n\n".join([f"## {run.about['model']}", table(headings, lines), source_line([file])])


def _answers(run: Run) -> Iterator[list[str]]:
    """Lines of one run: each task and all of them, each context and setting, over what every setting was asked."""
    groups: dict[tuple[int, str], dict[tuple[str, float], list[dict[str, Any]]]] = {}
    for row in run.rows:
        for task in (row["task"], _ALL):
            group = groups.setdefault((row["context_tokens"], task), {})
            group.setdefault((row["rule"], row["target"]), []).append(row)
    for (context, task), group in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] == _ALL)):
        documents = set.intersection(*({row["document"] for row in rows} for rows in group.values()))
        found = {}
        for setting, rows in group.items():
            kept = [row for row in rows if row["document"] in documents]
            if bits := [int(bit) for row in kept for bit in row["right"]]:
                found[setting] = _mean(row["pages_read"] for row in kept), estimate_mean(bits)
        curve = sorted((pages, right.value) for (rule, _), (pages, right) in found.items() if rule != _COVERAGE)
        for (rule, target), (pages, right) in found.items():
            name = {_FIXED: f"{target:.0f} tokens", _COVERAGE: f"coverage {target:g}"}.get(rule, rule)
            between = rule == _COVERAGE and curve and curve[0][0] <= pages <= curve[-1][0]
            fixed = f"{float(np.interp(pages, *np.array(curve).T)):.3f}" if between else ""
            share = f"{right.value:.3f} ({right.low:.3f}-{right.high:.3f})"
            yield [task, f"{context // 1024}K", name, f"{pages:.1f}", str(right.count), share, fixed]


def _equal_pages(files: Iterable[Path]) -> list[str]:
    headings = ["task", "context", "setting", "pages read", "questions", "right", "fixed budgets"]
    parts = []
    for file in files:
        run = read_run(file)
        source = source_line([file])
        parts += [f"### {run.about['model']}", table(headings, _answers(run)), source]
    return [_EQUAL_PAGES, *parts] if parts else []


def render() -> str:
    """The page with its results as they should be."""
    blocks = {"results": lambda: Block("\n\n".join([*map(_results, RESULT_FILES), *_equal_pages(ANSWER_FILES)]))}
    return fill(PAGE, PAGE.read_text(encoding="utf-8"), [GENERATOR], blocks)
