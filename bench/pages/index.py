"""The index of result files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bench.common.results import RESULTS, read_runs
from bench.pages.blocks import INDEX, link, relative, study_of, wrap

_ABOUT = """\
<!-- Written by `python -m bench.pages`. -->

# Results

All numbers in the pages come from these files, `MACHINE/STUDY/NAME.jsonl`.
The first line of a file describes the run: command, date, commit, versions, hardware (`head -1 FILE`).
Here each file stands with its commits; `-` is a commit that was not recorded.
Each other line is one measurement. Options and modules may have other names today than in a recorded command.
Machines: `cpu-2core` has two cores of a server processor, `h100` and `h200` have one to four NVIDIA H100 or H200.
A `+` after a commit means that the checkout had uncommitted changes.
"""
_COMMIT_CHARACTERS = 7


def result_files() -> list[Path]:
    """All result files, in order."""
    return sorted(RESULTS.rglob("*.jsonl"))


def is_misplaced(path: Path) -> bool:
    """Whether the path of a result file is not MACHINE/STUDY/NAME.jsonl."""
    return len(path.relative_to(RESULTS).parts) != 3


def render_index() -> str:
    """The index: a list for each study, a file with its commits in each item."""
    studies: dict[str, list[str]] = {}
    for path in result_files():
        studies.setdefault(": ".join(study_of(path)), []).append(_row(path))
    parts = [_ABOUT.strip()]
    for heading, rows in studies.items():
        parts += [f"## {heading}", wrap(", ".join(rows))]
    return relative(INDEX, "\n\n".join(parts) + "\n")


def _row(path: Path) -> str:
    runs = read_runs(path)
    commits = " ".join(dict.fromkeys(_short(run.commit) for run in runs))
    return f"{link(path.stem, path)} {commits}"


def _short(commit: str | None) -> str:
    if commit is None:
        return "-"
    return commit.rstrip("+")[:_COMMIT_CHARACTERS] + "+" * commit.endswith("+")


def linked_results(page: Path, targets: Sequence[str]) -> list[Path]:
    """The result files among the targets of a page's links, including missing ones."""
    paths = (Path(os.path.normpath(page.parent / target)) for target in targets)
    return [path for path in paths if path.is_relative_to(RESULTS) and path.suffix == ".jsonl"]
