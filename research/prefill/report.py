"""The study's page: every number and figure in it follows from the collected results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from bench.common.pages import table
from research.prefill.data import Key, Measured, Results, mean, paired
from research.prefill.engines import DECODES, PLATFORMS, PREFILLS, engine_name
from research.prefill.plan import (
    BOUNDS,
    COMPARED,
    CONTEXTS,
    DENSITIES,
    MAIN_CONTEXT,
    MASS_ALL,
    NARROW,
    ORACLE_MASS,
    POOLED,
    SCORE,
    SCORE_ALL,
    STAGES,
    STRIDES,
    TILES,
    Stage,
    coverages,
    finalists,
    floors,
    masses,
    queries,
    summaries,
    wide_tiles,
    with_strides,
)
from research.prefill.rules import Coverage, Density, Newest, Rule, Setting, ZipVL
from research.study.data import Cell, compare
from research.study.documents import TASKS
from research.study.report import interval, probability, run_lines, write_parts
from vllm_sparse_plugin.tools.needles import STRESS_TASKS

GENERATOR = "research.prefill"
SOURCE = "h200/sparse-prefill/all.jsonl"
"""Collected results."""
LEAST_ANSWERS = 100
"""Of a finalist; fewer are shown in no table of theirs, and elsewhere as counts."""
NOT_YET = "Not measured yet."
_FIGURES = "figures"
_BY_NAME = {stage.name: stage for stage in STAGES}
_WIDE, _FINALISTS, _TEXT, _ZIPVL = (_BY_NAME[name] for name in ("wide", "finalists", "text", "zipvl"))
_HEADINGS = (
    "setting", "density", "prefill loss", "answer loss", "right", "right, sparse decode", "look-alikes",
    "their answer loss",
)  # fmt: skip


def share(cell: Cell) -> str:
    """Right answers for a table, of many with an interval."""
    if not cell.right:
        return "-"
    if cell.answers < LEAST_ANSWERS:
        return f"{cell.correct}/{cell.answers}"
    return f"{cell.accuracy:.3f} ({cell.interval[0]:.2f}-{cell.interval[1]:.2f})"


def loss_difference(ours: dict[str, float], theirs: dict[str, float]) -> str:
    """A loss minus that of dense prefill, paired by document, for a table."""
    difference, error = paired(ours, theirs)
    if math.isnan(difference):
        return "-"
    return f"{difference:+.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


class Page:
    """The parts of the page, from the results of one file or none.

    A stage that its time limit cut has documents that only some of its settings have read. Every table compares the
    settings of one stage on the documents that all of them have read.
    """

    def __init__(self, results: Results | None) -> None:
        self.results = results
        self.cells = results.cells if results else {}
        self.shared = cache(self._shared)

    def _shared(self, stage: Stage, context: int, look_alikes: bool) -> frozenset[str]:
        """The documents that every measured setting of a stage has read."""
        cells = (self.cells.get(Key(context, look_alikes, setting.name)) for setting in stage.settings)
        read = [cell.read(stage.kind) for cell in cells if cell and cell.read(stage.kind)]
        return frozenset.intersection(*read) if read else frozenset()

    def cell(
        self, stage: Stage, setting: Setting | ZipVL, context: int = MAIN_CONTEXT, look_alikes: bool = False
    ) -> Measured | None:
        """What was measured of a setting on the documents that a stage's settings share; None if it lacks one."""
        cell, documents = (
            self.cells.get(Key(context, look_alikes, setting.name)),
            self.shared(stage, context, look_alikes),
        )
        return cell.of(documents) if cell and documents and documents <= cell.read(stage.kind) else None

    def line(
        self, stage: Stage, setting: Setting | ZipVL, context: int = MAIN_CONTEXT, least: int = 0
    ) -> list[str] | None:
        """A row of a table of settings, if enough was measured."""
        cell, dense = self.cell(stage, setting, context), self.cell(stage, Setting(), context)
        if not cell or not dense or cell.dense_decode.answers < least:
            return None
        cells = [
            f"`{setting.name}`",
            f"{cell.mean_density:.3f}",
            loss_difference(cell.prefill_loss, dense.prefill_loss),
            loss_difference(cell.answer_loss, dense.answer_loss),
            share(cell.dense_decode),
            share(cell.sparse_decode),
        ]
        alike, dense_alike = (self.cell(stage, each, context, True) for each in (setting, Setting()))
        if not alike or not dense_alike:
            return [*cells, "-", "-"]
        return [*cells, share(alike.dense_decode), loss_difference(alike.answer_loss, dense_alike.answer_loss)]

    def lines(
        self, stage: Stage, settings: Iterable[Setting | ZipVL], context: int = MAIN_CONTEXT, least: int = 0
    ) -> str:
        """A table of settings, with dense prefill first, and how many documents it is of."""
        distinct = {setting.name: setting for setting in (Setting(), *settings)}
        rows = [line for each in distinct.values() if (line := self.line(stage, each, context, least))]
        if len(rows) < 2:
            return NOT_YET
        return f"{table(_HEADINGS, rows)}\n\n{self.documents_of(stage, context)}"

    def documents_of(self, stage: Stage, context: int = MAIN_CONTEXT) -> str:
        """How many documents the tables of a stage are of, as a sentence."""
        others, alike = (len(self.shared(stage, context, look_alikes)) for look_alikes in (False, True))
        planned = stage.documents * len(stage.tasks)
        cut = f" The stage was cut by its time limit: {planned} were planned." if others + alike < planned else ""
        return f"On {others} documents, and {alike} of look-alikes.{cut}{self._dense_loss(stage, context)}"

    def _dense_loss(self, stage: Stage, context: int) -> str:
        dense = self.cell(stage, Setting(), context)
        return f" The prefill loss of dense prefill is {mean(dense.prefill_loss):.4f}." if dense else ""

    # The parts of the page, in its order.

    def compared(self) -> str:
        """The default beside others, in short."""
        rows = []
        for words, setting in {"dense": Setting(), **COMPARED}.items():
            cell, alike = (self.cell(_FINALISTS, setting, look_alikes=alike) for alike in (False, True))
            dense, default = (self.cell(_FINALISTS, each) for each in (Setting(), COMPARED["the default"]))
            if cell and alike and dense and default and cell.dense_decode.answers >= LEAST_ANSWERS:
                densities = (f"{each.mean_density:.3f}" for each in (cell, alike))
                losses = (loss_difference(cell.prefill_loss, each.prefill_loss) for each in (dense, default))
                right = (share(each.dense_decode) for each in (cell, alike))
                rows.append([words, f"`{setting.name}`", *densities, *losses, *right])
        headings = [
            "prefill", "setting", "density", "of look-alikes", "prefill loss minus dense", "minus the default", "right",
            "look-alikes",
        ]  # fmt: skip
        return f"{table(headings, rows)}\n\n{self.documents_of(_FINALISTS)}" if len(rows) > 1 else NOT_YET

    def bounds(self) -> str:
        """What no rule can beat, and what rules have to beat."""
        rules = (*BOUNDS, SCORE, SCORE_ALL, MASS_ALL)
        found = self.lines(_WIDE, (Setting(rule, Density(d)) for d in DENSITIES for rule in rules))
        return self._with_figure(found, "density", "Loss by density")

    def summaries(self) -> str:
        """Reductions of the statistics, and lambda."""
        return self.lines(_WIDE, (Setting(rule, Density(d)) for d in NARROW for rule in summaries()))

    def queries(self) -> str:
        """Which queries of a tile are asked."""
        return self.lines(_WIDE, (Setting(rule, Density(NARROW[1])) for rule in queries()))

    def tiles(self) -> str:
        """Tiles of 64 and of 128 tokens, by the stride of the queries."""
        rules = list(wide_tiles())
        settings = (Setting(rule, Density(NARROW[1]), tile) for rule in rules for tile in TILES)
        return self._with_figure(self.lines(_WIDE, settings), "strides", "Loss by stride")

    @staticmethod
    def _with_figure(found: str, name: str, title: str) -> str:
        return found if found == NOT_YET else f"{found}\n\n![{title}]({_FIGURES}/{name}.svg)"

    def masses(self) -> str:
        """Estimated masses."""
        return self.lines(_WIDE, (Setting(rule, Density(NARROW[1])) for rule in (SCORE_ALL, *masses())))

    def coverage(self) -> str:
        """Coverage beside density, from few blocks to many."""
        fixed = (Setting(rule, Density(d)) for rule in (MASS_ALL, SCORE_ALL, ORACLE_MASS) for d in DENSITIES)
        settings = [each for each in (*coverages(), *fixed) if self.cell(_WIDE, each)]

        def by_density(setting: Setting) -> float:
            cell = self.cell(_WIDE, setting)
            return cell.mean_density if cell else math.inf

        settings.sort(key=by_density)
        return self.lines(_WIDE, settings)

    def coverage_layers(self) -> str:
        """Where a coverage spends its blocks."""
        chosen = [each for each in finalists() if isinstance(each.choice, Coverage)]
        return self._by_layer({_FINALISTS: chosen, _WIDE: list(coverages())})

    def floors(self) -> str:
        """Least numbers of blocks, where contexts are short."""
        parts = []
        for context in CONTEXTS:
            found = self.lines(_WIDE if context == MAIN_CONTEXT else _BY_NAME["floors"], floors(), context)
            if found != NOT_YET:
                parts += [f"{context:,} tokens:", found]
        return "\n\n".join(parts) or NOT_YET

    def finalists(self) -> str:
        """The finalists, at the main length."""
        return self.lines(_FINALISTS, finalists(), least=LEAST_ANSWERS)

    def against_dense(self) -> str:
        """Differences of the shares of right answers."""
        rows = []
        dense, dense_alike = (self.cell(_FINALISTS, Setting(), look_alikes=alike) for alike in (False, True))
        for setting in finalists():
            cell, alike = (self.cell(_FINALISTS, setting, look_alikes=alike) for alike in (False, True))
            if not (cell and dense and alike and dense_alike) or cell.dense_decode.answers < LEAST_ANSWERS:
                continue
            pairs = (
                (cell.dense_decode, dense.dense_decode),
                (cell.sparse_decode, dense.sparse_decode),
                (alike.dense_decode, dense_alike.dense_decode),
            )
            cells = []
            for ours, theirs in pairs:
                found = compare(ours, theirs)
                between = interval(found.difference_interval)
                cells.append(f"{found.difference:+.3f} ({between}), {probability(found.p)}")
            rows.append([f"`{setting.name}`", *cells])
        headings = ["minus dense prefill", "dense decode", "sparse decode", "look-alikes, dense decode"]
        return table(headings, rows) if len(rows) > 1 else NOT_YET

    def tasks(self) -> str:
        """Where the answers are lost."""
        rows = []
        for setting in finalists():
            cells = {
                name: self.cell(_FINALISTS, setting, look_alikes=name in STRESS_TASKS)
                for name in (*TASKS, *STRESS_TASKS)
            }
            if not all(cells.values()):
                continue
            counts = []
            for task, cell in cells.items():
                assert cell
                bits = "".join(right for name, right in cell.right.items() if name.startswith(f"{task}-"))
                counts.append(f"{bits.count('1')}/{len(bits)}")
            rows.append([f"`{setting.name}`", *counts])
        return table(["setting", *TASKS, *STRESS_TASKS], rows) if len(rows) > 1 else NOT_YET

    def engines(self) -> str:
        """Answers of whole engines beside those of torch, to the same questions."""
        rows = []
        for platform, prefill, decode in product(PLATFORMS, PREFILLS, DECODES):
            setting, _ = PREFILLS[prefill]
            counts = self._engine_answers(engine_name(platform, prefill), setting.name, DECODES[decode])
            if counts:
                rows.append([platform.upper(), prefill, decode, *map(str, counts)])
        headings = ["engine on a", "prefill", "decode", "questions", "right", "right in torch", "judged differently"]
        return table(headings, rows) if rows else NOT_YET

    def _engine_answers(self, engine: str, setting: str, decode: str) -> tuple[int, int, int, int] | None:
        """Questions that both were asked, right answers of the engine and of torch, and how many only one has right."""
        pairs = []
        for key, cell in self.cells.items():
            if key.setting == engine and (plain := self.cells.get(key._replace(setting=setting))):
                ours, torch = getattr(cell, decode), getattr(plain, decode)
                pairs += [
                    pair for name in ours.keys() & torch.keys() for pair in zip(ours[name], torch[name], strict=True)
                ]
        if not pairs:
            return None
        right = [sum(pair[side] == "1" for pair in pairs) for side in (0, 1)]
        return len(pairs), right[0], right[1], sum(ours != theirs for ours, theirs in pairs)

    def lengths(self) -> str:
        """The finalists at other lengths."""
        parts = []
        for context in CONTEXTS:
            found = self.lines(_BY_NAME["lengths"], finalists(), context)
            if context != MAIN_CONTEXT and found != NOT_YET:
                parts += [f"{context:,} tokens:", found]
        return "\n\n".join(parts) or NOT_YET

    def text(self) -> str:
        """Perplexity after a sparse prefill."""
        rows = []
        dense = self.cell(_TEXT, Setting())
        for setting in finalists():
            cell = self.cell(_TEXT, setting)
            if dense and cell:
                difference = loss_difference(cell.text_loss, dense.text_loss)
                prefill = loss_difference(cell.prefill_loss, dense.prefill_loss)
                size = f"{len(cell.text_loss)}", f"{cell.mean_density:.3f}"
                rows.append([f"`{setting.name}`", *size, f"{math.exp(mean(cell.text_loss)):.3f}", difference, prefill])
        headings = [
            "setting", "documents", "density", "perplexity of the newest text", "its loss minus dense",
            "loss of the prefilled text minus dense",
        ]  # fmt: skip
        return table(headings, rows) if len(rows) > 1 else NOT_YET

    def zipvl(self) -> str:
        """ZipVL as published."""
        rows = []
        for setting in self._zipvl_settings():
            cell, alike = (self.cell(_ZIPVL, setting, look_alikes=alike) for alike in (False, True))
            if not cell:
                continue
            shares = [share(each) for each in (cell.dense_decode, cell.sparse_decode)]
            shares += [share(each) for each in (alike.dense_decode, alike.sparse_decode)] if alike else ["-", "-"]
            rows.append([f"`{setting.name}`", f"{cell.mean_density:.3f}", f"{mean(cell.answer_loss):.4f}", *shares])
        headings = [
            "setting", "mean p", "answer loss", "right, decoded over everything", "over K[T]",
            "look-alikes, over everything", "over K[T]",
        ]  # fmt: skip
        return table(headings, rows) if rows else NOT_YET

    def zipvl_layers(self) -> str:
        """ZipVL's p by layer and task."""
        return self._by_layer({_ZIPVL: [each for each in self._zipvl_settings() if each.share is None]})

    @staticmethod
    def _zipvl_settings() -> list[ZipVL]:
        return [each for each in _ZIPVL.settings if isinstance(each, ZipVL)]

    def _by_layer(self, settings: Mapping[Stage, Sequence[Setting | ZipVL]]) -> str:
        rows = []
        for stage, setting in ((stage, each) for stage, chosen in settings.items() for each in chosen):
            for task in (*TASKS, *STRESS_TASKS):
                cell = self.cell(stage, setting, look_alikes=task in STRESS_TASKS)
                layers = cell.layer_densities(task) if cell else []
                if layers:
                    shares = (sum(layers) / len(layers), *layers)
                    rows.append([f"`{setting.name}`", task, *(f"{each:.2f}" for each in shares)])
        if not rows:
            return NOT_YET
        return table(["setting", "task", "mean", *(f"layer {i}" for i in range(len(rows[0]) - 3))], rows)

    def provenance(self) -> str:
        """What was measured, and where the numbers come from."""
        stages = table(
            [
                "stage", "contexts", "tasks", "documents of each", "questions of a document", "settings",
                "documents that all settings have read",
            ],
            [
                [
                    each.name, ", ".join(f"{c:,}" for c in each.contexts), ", ".join(each.tasks), str(each.documents),
                    str(each.questions) if each.kind != "text" else "-", str(len(each.settings)),
                    f"{self._count_shared(each)} of {each.documents * len(each.tasks) * len(each.contexts)}",
                ]
                for each in STAGES
            ],
        )  # fmt: skip
        lines = run_lines(self.results.path, self.results.runs) if self.results else [NOT_YET]
        return "\n".join([stages, "", *lines])

    def _count_shared(self, stage: Stage) -> int:
        return sum(len(self.shared(stage, context, alike)) for context in stage.contexts for alike in (False, True))

    # The figures.

    def draw(self, folder: Path) -> None:
        """Writes every figure that the results suffice for."""
        for name, figure in (("density", self._density()), ("strides", self._strides())):
            if figure:
                folder.mkdir(exist_ok=True)
                with mpl.rc_context({"svg.hashsalt": name}):
                    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
                plt.close(figure)

    def _excess(self, settings: Iterable[Setting]) -> list[tuple[Setting, float, float, float]]:
        """Density, prefill loss minus dense, and its error, of the settings that were measured."""
        dense = self.cell(_WIDE, Setting())
        cells = [(setting, self.cell(_WIDE, setting)) for setting in settings]
        return [
            (setting, cell.mean_density, *paired(cell.prefill_loss, dense.prefill_loss))
            for setting, cell in cells
            if cell and dense and cell.prefill_loss
        ]

    def _density(self) -> Figure | None:
        rules: Sequence[Rule | Newest] = (ORACLE_MASS, MASS_ALL, SCORE_ALL, SCORE, POOLED, Newest())
        series = [(rule.label, [Setting(rule, Density(d)) for d in DENSITIES]) for rule in rules]
        covered = list(coverages())
        for rule in dict.fromkeys(each.rule for each in covered):
            assert rule
            series.append((f"{rule.label}, coverage", [each for each in covered if each.rule == rule]))
        figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
        for label, settings in series:
            points = sorted(point[1:] for point in self._excess(settings))
            if points:
                x, y, error = zip(*points, strict=True)
                line = "--" if label.endswith("coverage") else "-"
                axes.errorbar(x, y, error, label=label, marker="o", capsize=2, lw=1.2, linestyle=line)
        return self._finish(figure, "blocks read, share of those before the tile")

    def _strides(self) -> Figure | None:
        figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
        for rule in (SCORE, SCORE_ALL):
            for tile in TILES:
                settings = (Setting(each, Density(NARROW[1]), tile) for each in with_strides(rule, STRIDES))
                points = self._excess(settings)
                x = [each.rule.queries.stride for each, *_ in points if isinstance(each.rule, Rule)]
                y, error = [point[2] for point in points], [point[3] for point in points]
                if points:
                    axes.errorbar(
                        x,
                        y,
                        error,
                        label=f"{rule.label.removesuffix('/s1')}, T = {tile}",
                        marker="o",
                        capsize=2,
                        lw=1.2,
                    )
        return self._finish(figure, "one query of so many is asked")

    @staticmethod
    def _finish(figure: Figure, label: str) -> Figure | None:
        axes = figure.axes[0]
        if not axes.containers:
            plt.close(figure)
            return None
        axes.set_xscale("log", base=2)
        axes.set_xlabel(label)
        axes.set_ylabel("loss of the prefilled text minus dense")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        return figure


PARTS: dict[str, Callable[[Page], str]] = {
    "compared": Page.compared,
    "bounds": Page.bounds,
    "summaries": Page.summaries,
    "queries": Page.queries,
    "tiles": Page.tiles,
    "masses": Page.masses,
    "coverage": Page.coverage,
    "coverage-layers": Page.coverage_layers,
    "floors": Page.floors,
    "finalists": Page.finalists,
    "against-dense": Page.against_dense,
    "tasks": Page.tasks,
    "engines": Page.engines,
    "lengths": Page.lengths,
    "text": Page.text,
    "zipvl": Page.zipvl,
    "zipvl-layers": Page.zipvl_layers,
    "provenance": Page.provenance,
}


def write_page(path: Path, results: Path, check: bool) -> None:
    """Write the page's generated parts and its figures, or refuse a page that is out of date.

    Raises:
        ConfigurationError: if a part of the page is missing or out of date.
    """
    page = Page(Results(results / SOURCE) if (results / SOURCE).exists() else None)
    write_parts(path, GENERATOR, {name: partial(part, page) for name, part in PARTS.items()}, check)
    if not check:
        page.draw(path.parent / _FIGURES)
