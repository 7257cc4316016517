"""The study's page: every number and figure in it follows from the collected results."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.models import NEEDLE_8M, open_model
from bench.common.pages import Block, block_names, fill, link, recorded_commit, table, wrap, write_or_check
from bench.common.results import Run
from research.study.data import Cell, Results, compare
from research.study.documents import TASKS
from research.study.plan import (
    BUDGETS,
    CONTEXTS,
    DIFFERENCES,
    FORMATS,
    HALF,
    LAMBDAS,
    MAIN_CONTEXT,
    PAGE_SIZES,
    PAIRS,
    SKETCH,
    SMALL_BUDGETS,
    STAGES,
    streaming_llm,
)
from research.study.scores import Interval, Mean, Newest, Oracle, PageScore
from research.study.settings import Setting, Stress
from vllm_sparse_plugin.errors import ConfigurationError

GENERATOR = "research.study"
SOURCES = ("h200/page-scores/all.jsonl", "cpu-2core/page-scores/all.jsonl")
"""Collected results, the most complete first."""
LEAST_ANSWERS = 200
"""Fewer are shown in no table."""
UNIQUE = Mean("int8", 0.75)
_FIGURES = "figures"
_NOT_YET = "Not measured yet."
_MAIN: tuple[PageScore, ...] = (
    UNIQUE, Mean("int8", 1.0), Mean("int8", 0.0), Interval(16), Interval(8), HALF, SKETCH, DIFFERENCES, PAIRS,
    Oracle("logit"), Oracle("mass"),
)  # fmt: skip


def interval(ends: tuple[float, float]) -> str:
    """For a table."""
    return f"{ends[0]:.2f} to {ends[1]:.2f}"


def probability(p: float) -> str:
    """For a table."""
    return f"p = {p:.2g}" if p >= 1e-4 else "p < 0.0001"


def machine(path: Path) -> str:
    """The machine of a result file."""
    return path.parent.parent.name


def run_lines(path: Path, runs: Iterable[Run]) -> list[str]:
    """Where and when a result file was measured, a line for all the shards of a run."""
    by_command = {re.sub(r"\d+(?=/\d+\b|\.jsonl)", "I", run.command): run for run in runs}
    file = link(machine(path), path)
    lines = []
    for command, run in by_command.items():
        origin = f"{run.day}, {recorded_commit(run)}; {run.hardware}; {run.versions}."
        lines.append(wrap(f"- {file}: `{command}`, {origin}", "  "))
    return lines


class Page:
    """The parts of the page, from the results of one file."""

    def __init__(self, results: list[Results], folder: Path, look_alikes: bool = False) -> None:
        self.main, self.all, self.folder, self._look_alikes = results[0], results, folder, look_alikes
        with open_model(NEEDLE_8M.name) as model:
            self.head_size = int(model.config["head_dim"])

    def cell(self, setting: Setting, context: int = MAIN_CONTEXT) -> Cell | None:
        """What was measured of a setting, if that is enough to be shown."""
        cell = self.main.cells.get((context, self._look_alikes, setting.name))
        return cell if cell and cell.answers >= LEAST_ANSWERS else None

    def share(self, setting: Setting, context: int = MAIN_CONTEXT) -> str:
        """Accuracy with its interval, for a table."""
        cell = self.cell(setting, context)
        if cell is None:
            return "-"
        low, high = cell.interval
        return f"{cell.accuracy:.3f} ({low:.2f}-{high:.2f})"

    def bytes_of(self, score: PageScore, page_size: int = 8) -> int:
        """Bytes of a page's record."""
        return score.record_bytes(page_size, self.head_size)

    def bytes_read(self, setting: Setting, cell: Cell) -> float:
        """Bytes a KV head reads per token and layer: records of all pages, keys and values of the selected ones."""
        assert setting.score is not None
        records = cell.context_tokens // setting.page_size * self.bytes_of(setting.score, setting.page_size)
        return records + cell.pages_read[0] * setting.page_size * 4 * self.head_size

    # The parts of the page, in its order.

    def provenance(self) -> str:
        """Where the numbers come from."""
        lines = [line for results in self.all for line in run_lines(results.path, results.runs)]
        stages = table(
            ["stage", "contexts", "tasks", "settings"],
            [
                [each.name, ", ".join(f"{c:,}" for c in each.contexts), ", ".join(each.tasks), str(len(each.settings))]
                for each in STAGES
            ],
        )
        return "\n".join([stages, "", *lines])

    def targets(self) -> str:
        """The settings that the default is judged by."""
        dense = self.cell(Setting())
        rows = []
        goals: list[tuple[int, float | None, float]] = [(512, None, 0.99), (128, 0.0, 0.96), (64, None, 0.9)]
        for score in (UNIQUE, Mean("int8", 1.0), Interval(16), HALF, SKETCH, DIFFERENCES, PAIRS):
            for budget, margin, least in goals:
                cell = self.cell(Setting(score, 8, budget))
                if not cell or not dense:
                    continue
                found = compare(cell, dense)
                met = found.ratio >= least
                wanted = f"{least} of dense"
                against = "-"
                quest = self.cell(Setting(Interval(16), 8, budget))
                if quest and score != Interval(16):
                    beside = compare(cell, quest)
                    against = (
                        f"{beside.difference:+.3f} ({interval(beside.difference_interval)}), {probability(beside.p)}"
                    )
                    if margin is not None:
                        met &= beside.difference >= margin
                        wanted += ", quest"
                rows.append(
                    [
                        f"`{score.label}`",
                        str(self.bytes_of(score)),
                        str(budget),
                        self.share(Setting(score, 8, budget)),
                        f"{found.ratio:.3f} ({interval(found.ratio_interval)})",
                        against,
                        wanted,
                        "yes" if met else "**no**",
                    ]
                )
        headings = [
            "score", "bytes per page", "budget, tokens", "right answers", "of dense, paired", "minus quest, paired",
            "wanted", "met",
        ]  # fmt: skip
        return f"Dense: {self.share(Setting())}.\n\n{table(headings, rows)}"

    def rivals(self) -> str:
        """All budgets, pages of 8 tokens."""
        return self._by_budget(
            [
                *((score.label, self.bytes_of(score), lambda b, s=score: Setting(s, 8, b)) for score in _MAIN),
                ("streaming_llm, pages of 4", 0, lambda b: streaming_llm(4, b)),
            ],
            MAIN_CONTEXT,
        )

    def _by_budget(
        self, rows: Iterable[tuple[str, int, Callable[[int], Setting]]], context: int, budgets: Sequence[int] = BUDGETS
    ) -> str:
        lines = []
        for label, size, setting in rows:
            cells = [self.share(setting(budget), context) for budget in budgets]
            if set(cells) != {"-"}:
                lines.append([f"`{label}`", str(size), *cells])
        return table(["score", "bytes per page", *(f"{budget} tokens" for budget in budgets)], lines)

    def tasks(self) -> str:
        """Where the answers are lost."""
        rows = []
        for setting in (Setting(), *(Setting(score, 8, 64) for score in _MAIN)):
            if cell := self.cell(setting):
                shares = []
                for task in TASKS:
                    bits = "".join(right for name, right in cell.right.items() if name.startswith(f"{task}-"))
                    shares.append(f"{bits.count('1')}/{len(bits)}")
                rows.append([f"`{setting.name}`", *shares])
        return table(["setting", *TASKS], rows)

    def lambdas(self) -> str:
        """UNIQUE's lambda by page size and budget."""
        parts = []
        for page_size in PAGE_SIZES:
            rows = []
            for weight in LAMBDAS:
                cells = [self.cell(Setting(Mean("int8", weight), page_size, budget)) for budget in BUDGETS]
                if any(cells):
                    rows.append([f"{weight:g}", *(f"{cell.accuracy:.3f}" if cell else "-" for cell in cells)])
            if rows:
                title = f"Pages of {page_size} tokens:"
                parts += [title, table(["lambda", *(f"{budget} tokens" for budget in BUDGETS)], rows)]
        return "\n\n".join(parts) or _NOT_YET

    def best_lambda(self) -> str:
        """Each lambda beside the shipped one, pooled over page sizes and budgets."""
        rows = []
        for weight in LAMBDAS:
            gained = lost = 0
            for page_size in PAGE_SIZES:
                for budget in BUDGETS:
                    ours = self.cell(Setting(Mean("int8", weight), page_size, budget))
                    theirs = self.cell(Setting(UNIQUE, page_size, budget))
                    if ours and theirs:
                        pairs = [
                            p for name in ours.right for p in zip(ours.right[name], theirs.right[name], strict=True)
                        ]
                        gained += pairs.count(("1", "0"))
                        lost += pairs.count(("0", "1"))
            if gained + lost:
                rows.append([f"{weight:g}", str(gained), str(lost), f"{gained - lost:+d}"])
        headings = ["lambda", f"right where {UNIQUE.weight:g} is wrong", "the reverse", "difference"]
        return table(headings, rows) if rows else _NOT_YET

    def formats(self) -> str:
        """How the mean is stored."""
        rows = []
        for weight in (0.75, 1.0):
            for page_size in PAGE_SIZES:
                for kind in FORMATS:
                    score = Mean(kind, weight)
                    cells = [self.cell(Setting(score, page_size, budget)) for budget in BUDGETS]
                    if any(cells):
                        shares = (f"{cell.accuracy:.3f}" if cell else "-" for cell in cells)
                        rows.append([f"{weight:g}", str(page_size), kind, str(self.bytes_of(score)), *shares])
        headings = ["lambda", "page", "format", "bytes per page", *(f"{budget} tokens" for budget in BUDGETS)]
        return table(headings, rows) if rows else _NOT_YET

    def search(self) -> str:
        """Everything that was tried at small budgets, best first."""
        kinds = dict.fromkeys(
            replace(setting, budget_tokens=SMALL_BUDGETS[0])
            for stage in STAGES
            for setting in stage.settings
            if stage.name in ("core", "targets", "search") and setting.score and setting.budget_tokens in SMALL_BUDGETS
        )
        best = [self.cell(Setting(Mean("int8", 1.0), 8, budget)) for budget in SMALL_BUDGETS]
        rows = []
        for kind in kinds:
            cells = [self.cell(replace(kind, budget_tokens=budget)) for budget in SMALL_BUDGETS]
            assert kind.score is not None
            if isinstance(kind.score, Newest) or not all(cells):
                continue
            gains = []
            for cell, other in zip(cells, best, strict=True):
                found = compare(cell, other) if cell and other else None
                gains.append(f"{found.difference:+.3f}, {probability(found.p)}" if found else "-")
            size = self.bytes_of(kind.score, kind.page_size)
            shares = [self.share(replace(kind, budget_tokens=budget)) for budget in SMALL_BUDGETS]
            name = kind.name.replace(f"/b{kind.budget_tokens}", "")
            total = sum(cell.accuracy for cell in cells if cell)
            rows.append((total, [f"`{name}`", str(size), f"{size / kind.page_size:g}", *shares, *gains]))
        headings = [
            "score", "bytes per page", "per token", *(f"{budget} tokens" for budget in SMALL_BUDGETS),
            *(f"minus `{Mean('int8', 1.0).label}`, {budget}" for budget in SMALL_BUDGETS),
        ]  # fmt: skip
        return table(headings, [row for _, row in sorted(rows, key=lambda row: -row[0])]) if rows else _NOT_YET

    def adaptive(self) -> str:
        """Budgets that follow the distribution of scores, with a cap of 512 tokens."""
        settings = next(stage.settings for stage in STAGES if stage.name == "search")
        rows = [
            [f"`{setting.name}`", f"{cell.pages_read[0]:.1f}", self.share(setting)]
            for setting in settings
            if setting.mass < 1 and (cell := self.cell(setting))
        ]
        return table(["setting", "pages read, mean", "right answers"], rows) if rows else _NOT_YET

    def stress(self) -> str:
        """Keys as larger models have them."""
        kinds = get_args(Stress)
        rows = []
        for score in dict.fromkeys(each.score for stage in STAGES if stage.name == "stress" for each in stage.settings):
            settings = [
                Setting(score, 8, budget, stress=kind) if score else Setting(stress=kind)
                for kind in kinds
                for budget in SMALL_BUDGETS
            ]
            cells = [self.cell(setting) for setting in settings]
            if any(cells[len(SMALL_BUDGETS) :]):
                label, size = (score.label, str(self.bytes_of(score))) if score else ("dense", "")
                rows.append([f"`{label}`", size, *(f"{cell.accuracy:.3f}" if cell else "-" for cell in cells)])
        headings = ["score", "bytes per page", *(f"{kind}, {budget}" for kind in kinds for budget in SMALL_BUDGETS)]
        return table(headings, rows) if rows else _NOT_YET

    def lengths(self) -> str:
        """Other contexts."""
        parts = []
        for context in CONTEXTS:
            if context == MAIN_CONTEXT or not self.cell(Setting(), context):
                continue
            parts.append(f"{context:,} tokens, dense {self.share(Setting(), context)}:")
            parts.append(
                self._by_budget(
                    [
                        *((score.label, self.bytes_of(score), lambda b, s=score: Setting(s, 8, b)) for score in _MAIN),
                        ("streaming_llm, pages of 4", 0, lambda b: streaming_llm(4, b)),
                    ],
                    context,
                )
            )
        return "\n\n".join(parts) or _NOT_YET

    def look_alikes(self) -> str:
        """Documents that are nothing but needles."""
        page = Page(self.all, self.folder, look_alikes=True)
        return f"Dense: {page.share(Setting())}.\n\n{page.rivals()}" if page.cell(Setting()) else _NOT_YET

    def text(self) -> str:
        """Loss of the newest text, where needles do not matter."""
        rows = []
        key = (MAIN_CONTEXT, False, "dense")
        source = next((each for each in self.all if (cell := each.cells.get(key)) and cell.loss), self.main)
        dense = source.cells.get(key)
        stage = next(stage for stage in STAGES if stage.of_text)
        for setting in stage.settings:
            cell = source.cells.get((MAIN_CONTEXT, False, setting.name))
            if not dense or not cell or cell.loss.keys() != dense.loss.keys() or not dense.loss:
                continue
            loss = sum(cell.loss.values()) / len(cell.loss)
            differences = [cell.loss[name] - dense.loss[name] for name in dense.loss]
            mean = sum(differences) / len(differences)
            spread = math.sqrt(sum((each - mean) ** 2 for each in differences) / max(len(differences) - 1, 1))
            error = 1.96 * spread / math.sqrt(len(differences))
            rows.append(
                [
                    f"`{setting.name}`",
                    str(len(cell.loss)),
                    f"{math.exp(loss):.3f}",
                    f"{mean:+.4f} ± {error:.4f}",
                    self.share(setting),
                ]
            )
        headings = [
            "setting",
            "documents",
            "perplexity of the newest text",
            "loss minus dense, paired",
            "needles answered",
        ]
        return table(headings, rows) if rows else _NOT_YET

    def agreement(self) -> str:
        """The same cells on the other machine."""
        if len(self.all) < 2:
            return _NOT_YET
        rows = []
        for key, cell in self.all[1].cells.items():
            other = self.main.cells.get(key)
            if cell.right and cell.answers >= LEAST_ANSWERS and other and other.answers >= LEAST_ANSWERS:
                low, high = cell.interval
                theirs = other.interval
                overlap = "yes" if low <= theirs[1] and theirs[0] <= high else "**no**"
                rows.append(
                    [
                        f"`{cell.setting}`, {cell.context_tokens:,}",
                        f"{other.accuracy:.3f} ({interval(theirs)})",
                        f"{cell.accuracy:.3f} ({low:.2f}-{high:.2f})",
                        overlap,
                    ]
                )
        names = (machine(results.path) for results in self.all[:2])
        return table(["setting", *names, "intervals overlap"], rows)

    # The figures.

    def draw(self) -> None:
        """Writes every figure that the results suffice for."""
        folder = self.folder / _FIGURES
        folder.mkdir(exist_ok=True)
        for name, figure in (("budgets", self._budgets()), ("bytes", self._bytes()), ("lambda", self._lambda())):
            if figure:
                with mpl.rc_context({"svg.hashsalt": name}):
                    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
                plt.close(figure)

    def _budgets(self) -> Figure:
        figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
        for score in _MAIN:
            self._line(axes, [Setting(score, 8, budget) for budget in reversed(BUDGETS)], score.label)
        self._line(axes, [streaming_llm(4, budget) for budget in reversed(BUDGETS)], "streaming_llm")
        if dense := self.cell(Setting()):
            axes.axhline(dense.accuracy, color="black", linestyle=":", label="dense")
        axes.set_xscale("log", base=2)
        axes.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS])
        axes.set_xlabel("budget, tokens")
        self._finish(axes)
        return figure

    def _line(self, axes: Axes, settings: Sequence[Setting], label: str) -> None:
        points = [(setting.budget_tokens, cell) for setting in settings if (cell := self.cell(setting))]
        if points:
            shares = [cell.accuracy for _, cell in points]
            below = [cell.accuracy - cell.interval[0] for _, cell in points]
            above = [cell.interval[1] - cell.accuracy for _, cell in points]
            axes.errorbar([x for x, _ in points], shares, (below, above), label=label, marker="o", capsize=2, lw=1.2)

    def _bytes(self) -> Figure:
        figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
        dense_bytes = MAIN_CONTEXT * 4 * self.head_size
        for score in (score for score in _MAIN if not isinstance(score, Oracle)):
            found = [(s, cell) for budget in BUDGETS if (cell := self.cell(s := Setting(score, 8, budget)))]
            if found:
                x = [self.bytes_read(setting, cell) / dense_bytes for setting, cell in found]
                axes.plot(x, [cell.accuracy for _, cell in found], marker="o", label=score.label, lw=1.2)
        axes.set_xlabel("bytes read per step, share of dense attention")
        axes.set_xscale("log")
        self._finish(axes)
        return figure

    def _lambda(self) -> Figure | None:
        if not self.cell(Setting(Mean("int8", 4.0), 8, 64)):
            return None
        figure, panels = plt.subplots(2, 2, figsize=(9, 6.5), layout="constrained", sharex=True, sharey=True)
        for axes, page_size in zip(panels.flat, PAGE_SIZES, strict=True):
            for budget in BUDGETS:
                cells = [(w, self.cell(Setting(Mean("int8", w), page_size, budget))) for w in LAMBDAS]
                points = [(weight, cell.accuracy) for weight, cell in cells if cell]
                if points:
                    axes.plot(*zip(*points, strict=True), marker=".", label=f"{budget} tokens")
            axes.set_title(f"pages of {page_size} tokens")
            axes.grid(alpha=0.3)
        panels[0, 0].legend(fontsize="small")
        figure.supxlabel("lambda")
        figure.supylabel("right answers")
        return figure

    @staticmethod
    def _finish(axes: Axes) -> None:
        axes.set_ylabel("right answers")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=2)


PARTS: dict[str, Callable[[Page], str]] = {
    "targets": Page.targets,
    "rivals": Page.rivals,
    "tasks": Page.tasks,
    "look-alikes": Page.look_alikes,
    "text": Page.text,
    "search": Page.search,
    "adaptive": Page.adaptive,
    "stress": Page.stress,
    "lambdas": Page.lambdas,
    "best-lambda": Page.best_lambda,
    "formats": Page.formats,
    "lengths": Page.lengths,
    "agreement": Page.agreement,
    "provenance": Page.provenance,
}


def write_page(path: Path, results: Path, check: bool) -> None:
    """Write the page's generated parts and its figures, or refuse a page that is out of date.

    Raises:
        ConfigurationError: if there are no results, or a part of the page is missing or out of date.
    """
    found = [Results(results / name) for name in SOURCES if (results / name).exists()]
    if not found:
        raise ConfigurationError(f"results: got none, allowed: {' or '.join(SOURCES)} in {results.name}")
    page = Page(found, path.parent)
    write_parts(path, GENERATOR, {name: partial(part, page) for name, part in PARTS.items()}, check)
    if not check:
        page.draw()


def write_parts(path: Path, generator: str, parts: Mapping[str, Callable[[], str]], check: bool) -> None:
    """Write the generated parts of a study's page, or refuse a page that is out of date.

    Args:
        path: of the page.
        generator: what marks its parts, a module with a command `report`.
        parts: what makes each part, by name.
        check: whether only to look.

    Raises:
        ConfigurationError: if a part of the page is missing or out of date.
    """
    text = path.read_text(encoding="utf-8")
    missing = parts.keys() - set(block_names(text, [generator]))
    if missing:
        names = ", ".join(sorted(missing))
        raise ConfigurationError(f"page: got one without {names}, allowed: all of {', '.join(parts)}")
    blocks = {name: partial(_block, part) for name, part in parts.items()}
    write_or_check(f"python -m {generator} report", {path: fill(path, text, [generator], blocks)}, check)


def _block(part: Callable[[], str]) -> Block:
    return Block(part())
