"""Results of the study: folded into a line for each setting and length, and what can be said of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.common.results import ResultFile, Row, Run, read_runs
from research.study.data import Cell
from research.study.documents import TEXT
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.needles import STRESS_TASKS

BY_DOCUMENT = ("right", "right_sparse", "answer_loss", "prefill_loss", "text_loss", "density")
"""What is kept of each document."""


class Key(NamedTuple):
    """What is measured together."""

    context_tokens: int
    look_alikes: bool
    """Whether the documents are nothing but needles."""
    setting: str


@dataclass
class Measured:
    """One setting at one length; every mapping is by document, `TASK-INDEX`."""

    setting: str
    context_tokens: int
    look_alikes: bool = False
    right: dict[str, str] = field(default_factory=dict)
    """1 for an answer that dense decode gives rightly and 0 for a wrong one, in the order of the questions."""
    right_sparse: dict[str, str] = field(default_factory=dict)
    """The same of decode under the default policy; after ZipVL, of decode that reads K[T] only."""
    answer_loss: dict[str, float] = field(default_factory=dict)
    """Mean negative log-probability of a token of the right answers, decoded densely."""
    prefill_loss: dict[str, float] = field(default_factory=dict)
    """The same of the second half of the document, as the prefill itself predicts it."""
    text_loss: dict[str, float] = field(default_factory=dict)
    """The same of the newest tokens of the document, decoded densely after a prefill of the others."""
    density: dict[str, list[float]] = field(default_factory=dict)
    """By layer, blocks read over blocks before the tiles; of ZipVL, the share of the prompt in T."""
    seconds: float = 0.0
    """In all."""

    def read(self, kind: str) -> frozenset[str]:
        """The documents that a stage of a kind has read."""
        return frozenset(self.text_loss if kind == TEXT else self.right)

    def of(self, documents: Set[str]) -> Measured:
        """The same of some documents."""
        found = Measured(self.setting, self.context_tokens, self.look_alikes)
        for what in BY_DOCUMENT:
            values = getattr(self, what)
            setattr(found, what, {name: values[name] for name in values if name in documents})
        return found

    def add(self, name: str, row: Row) -> None:
        """Add what `run` wrote of a document."""
        for what, value in row.items():
            if what not in ("document", "setting", "seconds"):
                getattr(self, what)[name] = value
        self.seconds = round(self.seconds + row.get("seconds", 0.0), 3)

    def merge(self, other: Measured) -> None:
        """Add what was measured of other documents."""
        for what in BY_DOCUMENT:
            getattr(self, what).update(getattr(other, what))
        self.seconds = round(self.seconds + other.seconds, 3)

    @property
    def dense_decode(self) -> Cell:
        """Answers that were decoded densely, for comparisons."""
        return Cell(self.setting, self.context_tokens, self.look_alikes, self.right)

    @property
    def sparse_decode(self) -> Cell:
        """Answers that were decoded sparsely, for comparisons."""
        return Cell(self.setting, self.context_tokens, self.look_alikes, self.right_sparse)

    @property
    def mean_density(self) -> float:
        """Over layers and documents."""
        layers = [each for layers in self.density.values() for each in layers]
        return sum(layers) / len(layers) if layers else math.nan

    def layer_densities(self, task: str) -> list[float]:
        """By layer, over the documents of a task."""
        found = [layers for name, layers in self.density.items() if name.startswith(f"{task}-")]
        return [sum(layer) / len(layer) for layer in zip(*found, strict=True)]


def mean(values: Mapping[str, float]) -> float:
    """Over documents."""
    return sum(values.values()) / len(values) if values else math.nan


def paired(ours: Mapping[str, float], theirs: Mapping[str, float]) -> tuple[float, float]:
    """The mean difference on the documents that both have, and 1.96 times its standard error, NaN of one document."""
    differences = [ours[name] - theirs[name] for name in sorted(ours.keys() & theirs.keys())]
    if not differences:
        return math.nan, math.nan
    middle = sum(differences) / len(differences)
    if len(differences) == 1:
        return middle, math.nan
    variance = sum((each - middle) ** 2 for each in differences) / (len(differences) - 1)
    return middle, 1.96 * math.sqrt(variance / len(differences))


class Results:
    """A collected file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[Run] = read_runs(path)
        self.cells = fold(self.runs)


def fold(runs: list[Run]) -> dict[Key, Measured]:
    """What was measured of each setting at each length, of raw and of collected files."""
    cells: dict[Key, Measured] = {}
    for row in (row for run in runs for row in run.rows):
        if "document" not in row:
            kept = Measured(**row)
            key = Key(kept.context_tokens, kept.look_alikes, kept.setting)
            cells.setdefault(key, Measured(key.setting, key.context_tokens, key.look_alikes)).merge(kept)
            continue
        task, context, _, index = row["document"].removeprefix(f"{TEXT}-").split("-")
        key = Key(int(context), task in STRESS_TASKS, row["setting"])
        cell = cells.setdefault(key, Measured(key.setting, key.context_tokens, key.look_alikes))
        density = cell.density.get(f"{task}-{index}")
        cell.add(f"{task}-{index}", row)
        if density and "text_loss" in row:
            cell.density[f"{task}-{index}"] = density
    return cells


def collect_runs(raw: list[Path], output: Path) -> None:
    """Fold what `run` wrote into one line for each setting and length, after the lines of the runs.

    Collected files may be among `raw`: their documents join those of the others.

    Raises:
        ConfigurationError: if a file cannot be read or written, or none has a measurement.
    """
    runs = [run for path in raw for run in read_runs(path)]
    abouts = [run.about for i, run in enumerate(runs) if run.rows or _is_header(runs, i)]
    cells = fold(runs)
    if not cells:
        raise ConfigurationError("raw: got files without a measurement, allowed: files with one or more")
    with ResultFile(output, abouts[0]) as file:
        for about in abouts[1:]:
            file.write(about)
        for key in sorted(cells):
            line: dict[str, Any] = {what: value for what, value in asdict(cells[key]).items() if value}
            file.write(line)


def _is_header(runs: list[Run], index: int) -> bool:
    """Whether a run's line stands before that of another in a collected file, whose rows are of both."""
    return not runs[index].rows and any("document" not in row for run in runs[index:] for row in run.rows[:1])


def summary_table(path: Path) -> str:
    """A short table of a raw or collected file, for the end of a run."""
    lines = [f"{'setting':44} {'context':>7} {'right':>9} {'sparse':>9} {'NLL':>8} {'prefill':>8} {'text':>8} density"]
    for key, cell in sorted(fold(read_runs(path)).items()):
        right, sparse = (
            f"{each.correct}/{each.answers}" if each.right else "-" for each in (cell.dense_decode, cell.sparse_decode)
        )
        losses = (f"{mean(each):8.4f}" for each in (cell.answer_loss, cell.prefill_loss, cell.text_loss))
        name = key.setting + " (look-alikes)" * key.look_alikes
        lines.append(
            f"{name:44} {key.context_tokens:7} {right:>9} {sparse:>9} {' '.join(losses)} {cell.mean_density:.3f}"
        )
    return "\n".join(lines)
