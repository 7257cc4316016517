"""Results of the study: folded into a line for each setting and length, and what can be said of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.results import ResultFile, Run, read_runs
from research.study.documents import TEXT
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.needles import STRESS_TASKS

_RESAMPLES = 2000


@dataclass
class Cell:
    """One setting at one length."""

    setting: str
    context_tokens: int
    look_alikes: bool = False
    """Whether the documents are nothing but needles."""
    right: dict[str, str] = field(default_factory=dict)
    """By document: 1 for a right answer and 0 for a wrong one, in the order of its questions."""
    loss: dict[str, float] = field(default_factory=dict)
    """By document: mean negative log-probability of a token of its newest text."""
    pages_read: list[float] = field(default_factory=list)
    """By document, where questions were answered: complete pages per KV head and token."""

    @property
    def answers(self) -> int:
        """Questions asked."""
        return sum(map(len, self.right.values()))

    @property
    def correct(self) -> int:
        """Questions answered rightly."""
        return sum(bits.count("1") for bits in self.right.values())

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.correct / self.answers

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the accuracy."""
        from scipy.stats import binomtest

        found = binomtest(self.correct, self.answers).proportion_ci(method="wilson")
        return float(found.low), float(found.high)

    def per_document(self, documents: list[str]) -> np.ndarray:
        """Right answers of each of `documents`."""
        return np.array([self.right[name].count("1") for name in documents], dtype=float)


@dataclass(frozen=True)
class Comparison:
    """One setting beside another on the same questions."""

    difference: float
    """Of the accuracies."""
    difference_interval: tuple[float, float]
    """95 %, by a bootstrap over documents, whose questions are not independent."""
    ratio: float
    """Of the accuracies."""
    ratio_interval: tuple[float, float]
    """Like `difference_interval`."""
    p: float
    """Of McNemar's exact test."""


def compare(cell: Cell, other: Cell) -> Comparison:
    """Both on the documents that both have read."""
    from scipy.stats import binomtest

    documents = sorted(cell.right.keys() & other.right.keys())
    pairs = [pair for name in documents for pair in zip(cell.right[name], other.right[name], strict=True)]
    gained, lost = pairs.count(("1", "0")), pairs.count(("0", "1"))
    p = float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    ours, theirs = cell.per_document(documents), other.per_document(documents)
    chosen = np.random.default_rng(0).integers(len(documents), size=(_RESAMPLES, len(documents)))
    sums, others = ours[chosen].sum(axis=1), theirs[chosen].sum(axis=1)

    def interval(values: np.ndarray) -> tuple[float, float]:
        low, high = np.quantile(values, (0.025, 0.975))
        return float(low), float(high)

    return Comparison(
        (gained - lost) / len(pairs),
        interval((sums - others) / len(pairs)),
        ours.sum() / max(theirs.sum(), 1),
        interval(sums / np.maximum(others, 1)),
        p,
    )


class Results:
    """A collected file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[Run] = read_runs(path)
        self.cells: dict[tuple[int, bool, str], Cell] = {}
        """By length, whether of look-alikes, and setting."""
        for run in self.runs:
            for row in run.rows:
                cell = Cell(**row)
                self.cells[cell.context_tokens, cell.look_alikes, cell.setting] = cell


def collect_runs(raw: list[Path], output: Path) -> None:
    """Fold what `run` wrote into one line for each setting and length, after the lines of the runs.

    Collected files may be among `raw`: their documents join those of the others.

    Raises:
        ConfigurationError: if a file cannot be read or written, or none has a measurement.
    """
    abouts: list[dict[str, Any]] = []
    cells: dict[tuple[int, bool, str], Cell] = {}
    for run in (run for path in raw for run in read_runs(path)):
        if run.rows:
            abouts.append(run.about)
        for row in run.rows:
            if "document" not in row:
                kept = Cell(**row)
                key = kept.context_tokens, kept.look_alikes, kept.setting
                cell = cells.setdefault(key, Cell(key[2], key[0], key[1]))
                cell.pages_read += kept.pages_read * len(kept.right)
                cell.right |= kept.right
                cell.loss |= kept.loss
                continue
            name = row["document"].removeprefix(f"{TEXT}-")
            task, context, _, index = name.split("-")
            key = int(context), task in STRESS_TASKS, row["setting"]
            cell = cells.setdefault(key, Cell(key[2], key[0], key[1]))
            if "loss" in row:
                cell.loss[f"{task}-{index}"] = row["loss"]
            else:
                cell.right[f"{task}-{index}"] = row["right"]
                cell.pages_read.append(row["pages_read"])
    if not abouts:
        raise ConfigurationError("raw: got files without a measurement, allowed: files with one or more")
    lines = [*abouts]
    for cell in (cells[key] for key in sorted(cells)):
        line: dict[str, Any] = {"setting": cell.setting, "context_tokens": cell.context_tokens}
        line |= {"look_alikes": True} if cell.look_alikes else {}
        if cell.right:
            line |= {"right": cell.right, "pages_read": [round(sum(cell.pages_read) / len(cell.pages_read), 2)]}
        lines.append(line | ({"loss": cell.loss} if cell.loss else {}))
    with ResultFile(output, abouts[0]) as file:
        for line in lines[1:]:
            file.write(line)
