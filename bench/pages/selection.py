"""Blocks about page statistics on the keys of pretrained models: two levels, copies of pages, and learned gates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.common.options import size_text
from bench.common.pages import Block, table, wrap
from bench.common.results import RESULTS, Row, read_rows, read_run
from vllm_sparse_plugin.tools.eval.statistics import estimate_amount

_REAL = RESULTS / "cpu-2core" / "real"
LONG = _REAL / "selection_gemma_32k.jsonl"
COPIES = {
    "Gemma 3 270M": [_REAL / "selection_gemma.jsonl", LONG],
    "SmolLM2-135M": [_REAL / "selection_smollm2.jsonl"],
    "needle-8m": [_REAL / "selection_needle-8m.jsonl"],
}
"""Result files by model."""
GATES = RESULTS / "h200" / "gates"
_NOTHING = "Nothing has been measured on a GPU yet."
_FLAT, _LEVELED, _ORACLE = "quarters", "leveled_quarters", "oracle"
_REFINED = 0.25
_BUDGETS = (64, 128, 256)
"""Pages."""
_PAGE_TOKENS, _WAYS, _BUDGET_TOKENS, _ROOMS = 8, 8, 1024, (4, 8)


def levels() -> Block:
    """The weight that flat quarters find, and what two levels lose of it."""
    rows = _rows([LONG], "levels")
    flat = {budget: _by_text(rows, _FLAT, 1.0, budget) for budget in _BUDGETS}
    lines = []
    for name, ranked_by in (("true weight (a bound)", _ORACLE), ("`quarters`", _FLAT)):
        found = (_by_text(rows, ranked_by, 1.0, budget) for budget in _BUDGETS)
        lines.append([name, *(f"{_mean(each.values()):.3f}" for each in found)])
    differences = []
    for budget in _BUDGETS:
        masses = _by_text(rows, _LEVELED, _REFINED, budget)
        differences.append(_more([mass - flat[budget][text] for text, mass in masses.items()]))
    lines.append([f"`refined` {_REFINED}, minus `quarters`", *differences])
    return Block(table(["pages by", *(f"{budget * _PAGE_TOKENS:,} tokens" for budget in _BUDGETS)], lines), [LONG])


def copies() -> Block:
    """The shares of selected pages without a copy, after the first steps."""
    shares = {model: _shares(_rows(paths, "copies")) for model, paths in COPIES.items()}
    contexts = sorted({context for found in shares.values() for context in found})
    lines = [[model, *(found.get(context, "-") for context in contexts)] for model, found in shares.items()]
    sources = dict.fromkeys(path for paths in COPIES.values() for path in paths)
    return Block(table(["model", *map(size_text, contexts)], lines), list(sources))


def gate_files() -> list[Path]:
    """The result files of `research.selection gates`, one for each model; empty if not measured."""
    return sorted(GATES.glob("*.jsonl"))


def gates() -> Block:
    """The weight that quarters find on held-out texts, what each gate finds more, and how many texts were read."""
    lines, pages, files, read = [], list[int](), gate_files(), list[str]()
    for path in files:
        run = read_run(path)
        found: dict[tuple[str, int], dict[str, list[float]]] = {}
        names = dict[str, int]()
        for row in run.rows:
            if "statistics" in row:
                names[row["statistics"]] = row["record_bytes"]
                cell = found.setdefault((row["statistics"], row["target"] // row["page_size"]), {})
                cell.setdefault(row["document"], []).append(row["mass"])
        pages = sorted({count for _, count in found})
        masses = {cell: {name: _mean(each) for name, each in of.items()} for cell, of in found.items()}
        for name, size in names.items():
            if name in (_FLAT, _ORACLE):
                shown = [f"{_mean(masses[name, count].values()):.3f}" for count in pages]
            else:
                pairs = ((masses[name, count], masses[_FLAT, count]) for count in pages)
                shown = [_more([own[text] - flat[text] for text in flat]) for own, flat in pairs]
            title = {_FLAT: "`quarters`", _ORACLE: "true weight (a bound)"}.get(name, f"`{name}`, minus `quarters`")
            lines.append([run.about["model"], title, str(size), *shown])
        kinds = Counter(document.rpartition("-")[0] for document in masses[_FLAT, pages[0]])
        read.append(f"{run.about['model']} read {', '.join(f'{count} of {kind}' for kind, count in kinds.items())}")
    if not lines:
        return Block(_NOTHING)
    found_more = table(["model", "pages by", "bytes", *(f"{count} pages" for count in pages)], lines)
    return Block("\n\n".join([found_more, wrap(f"Held-out texts and questions: {'; '.join(read)}.", "")]), files)


def _shares(rows: Iterable[Row]) -> dict[int, str]:
    """The shares for each room, by context."""
    found: dict[int, dict[int, list[float]]] = {}
    for row in rows:
        if (row["ways"], row["budget_tokens"]) == (_WAYS, _BUDGET_TOKENS) and row["multiple"] in _ROOMS:
            found.setdefault(row["context_tokens"], {}).setdefault(row["multiple"], []).append(row["steady"])
    return {context: ", ".join(f"{_mean(of[room]):.1%}" for room in _ROOMS) for context, of in found.items()}


def _rows(paths: Sequence[Path], arm: str) -> list[Row]:
    return [row for row in read_rows(paths) if row.get("arm") == arm]


def _by_text(rows: Iterable[Row], ranked_by: str, refined: float, pages: int) -> dict[str, float]:
    """The mean weight of the layers of each text."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if (row["ranked_by"], row["refined"], row["pages"]) == (ranked_by, refined, pages):
            found.setdefault(row["text"], []).append(row["mass"])
    return {text: _mean(values) for text, values in found.items()}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _more(differences: list[float]) -> str:
    """A mean, with its interval if there are several."""
    found = estimate_amount(differences)
    return f"{found.value:+.3f}" + (f" [{found.low:+.3f}, {found.high:+.3f}]" if found.count > 1 else "")
