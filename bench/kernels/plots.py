"""Figures of a result file. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.options import size_text
from bench.common.results import Row, Run
from bench.kernels.cases import DEFAULT_FORMAT
from bench.kernels.runner import MEASURED


@dataclass(frozen=True)
class Times:
    """Cold times of an operation: a panel for each value of one dimension, a line for each provider."""

    op: str
    panel: str
    x: str
    title: str


FIGURES = (
    Times("decode", "batch", "context", "one attention layer of a decode step"),
    Times("score", "batch", "context", "scores of all pages"),
    Times("attend", "batch", "context", "attention over the selected pages"),
    Times("write", "batch", "context", "write of the new tokens"),
    Times("prefill", "chunk", "context", "one attention layer of a step of a prompt, and the parts of sparse prefill"),
    Times("topk", "rows", "pages", "selection of the best pages"),
)


def draw(run: Run, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Draws the measurements and returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = [row for row in run.rows if row["status"] == MEASURED]
    figures: dict[str, Figure] = {}
    for spec in FIGURES:
        of_op = [row for row in measured if row["op"] == spec.op]
        for group in _distinct(of_op, "group") or [None]:
            chosen = [row for row in of_op if row["case"].get("group") == group and _default_format(row)]
            if chosen:
                name = spec.op if group is None else f"{spec.op}_group{group}"
                figures[name] = _times_figure(spec, chosen, _subtitle(run, group))
    speed_ups = [row for row in measured if row["op"] == "decode" and row.get("speed_up")]
    for rival in dict.fromkeys(name for row in speed_ups for name in row["speed_up"] if "unique" not in name):
        figures[f"speed_up_{_file_name(rival)}"] = _speed_up_figure(speed_ups, rival, _subtitle(run, None))
    files = []
    for name, figure in figures.items():
        for suffix in formats:
            files.append(folder / f"{name}.{suffix}")
            figure.savefig(files[-1], dpi=150)
        plt.close(figure)
    return files


def _distinct(rows: Sequence[Row], dimension: str) -> list[Any]:
    return list(dict.fromkeys(row["case"][dimension] for row in rows if dimension in row["case"]))


def _default_format(row: Row) -> bool:
    return bool(row["case"].get("format", DEFAULT_FORMAT) == DEFAULT_FORMAT)


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text.lower())


def _subtitle(run: Run, group: int | None) -> str:
    heads = "" if group is None else f"; 8 KV heads, {group} query heads each"
    return f"{run.machine}, cold L2, median and 20-80 %{heads}"


def _size_axis(axes: Axes, sizes: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(sizes), [size_text(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.grid(visible=True, alpha=0.3)


def _times_figure(spec: Times, rows: Sequence[Row], subtitle: str) -> Figure:
    panels = sorted(_distinct(rows, spec.panel))
    figure: Figure = plt.figure(figsize=(1 + 3.2 * len(panels), 3.8), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    for axes, panel in zip(grid[0], panels, strict=True):
        here = [row for row in rows if row["case"][spec.panel] == panel]
        for index, provider in enumerate(providers):
            line = sorted((row for row in here if row["provider"] == provider), key=lambda row: row["case"][spec.x])
            if not line:
                continue
            sizes = [row["case"][spec.x] for row in line]
            colour = f"C{index}"
            axes.plot(sizes, [row["cold"]["median_us"] for row in line], "o-", ms=3, color=colour, label=provider)
            low, high = ([row["cold"][key] for row in line] for key in ("p20_us", "p80_us"))
            axes.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
        _size_axis(axes, sorted(_distinct(here, spec.x)), spec.x)
        axes.set_yscale("log")
        axes.set_title(f"{spec.panel} {panel}", fontsize=9)
    grid[0][0].set_ylabel("µs")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), fontsize=8)
    figure.suptitle(f"{spec.title}\n{subtitle}", fontsize=10)
    return figure


def _speed_up_figure(rows: Sequence[Row], rival: str, subtitle: str) -> Figure:
    groups = sorted(_distinct(rows, "group"))
    figure: Figure = plt.figure(figsize=(1 + 3.6 * len(groups), 3.6), layout="constrained")
    grid = figure.subplots(1, len(groups), sharey=True, squeeze=False)
    for axes, group in zip(grid[0], groups, strict=True):
        here = [row for row in rows if row["case"]["group"] == group and rival in row["speed_up"]]
        for batch in sorted(_distinct(here, "batch")):
            line = sorted(
                (row for row in here if row["case"]["batch"] == batch), key=lambda row: row["case"]["context"]
            )
            sizes = [row["case"]["context"] for row in line]
            axes.plot(sizes, [row["speed_up"][rival]["cold"] for row in line], "o-", ms=3, label=f"batch {batch}")
        _size_axis(axes, sorted(_distinct(here, "context")), "context")
        axes.set_yscale("log", base=2)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(f"{group} query heads of a KV head", fontsize=9)
    grid[0][0].set_ylabel(f"{rival} / unique")
    grid[0][0].legend(fontsize=8)
    figure.suptitle(f"one attention layer of a decode step\n{subtitle}", fontsize=10)
    return figure
