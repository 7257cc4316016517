"""The index of result files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.common.pages import INDEX, index_heading, link, recorded_commit, relative, wrap
from bench.common.results import RESULTS, ROOT, Run, read_runs

_MOVED = {
    "bench.study": "research.study",
    "bench.termination": "research.termination",
    "bench.witness": "research.witness",
    "bench/decode_cpu.py": "bench.serving decode-cpu",
}
"""Names in recorded commands, and what they are called today."""
_ABOUT = f"""\
<!-- Written by `python -m bench.pages`. -->

# Results

Every number in the pages of this project comes from a file below, `MACHINE/STUDY/NAME.jsonl`: a line that describes the
run, then a line for each measurement. Commands are as they were typed, on the commit that stands beside them, so some
of their names and options have changed since: {", ".join(f"`{old}` is `{new}`" for old, new in _MOVED.items())}; the
files were called otherwise. A `+` behind a commit says that files of the checkout differed from it.
"""


def result_files() -> list[Path]:
    """All result files, in order."""
    return sorted(RESULTS.rglob("*.jsonl"))


def is_misplaced(path: Path) -> bool:
    """Whether a result file is anywhere but at MACHINE/STUDY/NAME.jsonl."""
    return len(path.relative_to(RESULTS).parts) != 3


def render_index(uses: Mapping[Path, Sequence[Path]]) -> str:
    """The index.

    Args:
        uses: the pages that show or name each result file.
    """
    studies: dict[str, dict[str, list[str]]] = {}
    for path in result_files():
        runs = read_runs(path)
        about = f"{runs[0].hardware}; {runs[0].versions}:"
        entries = studies.setdefault(index_heading(path), {}).setdefault(about, [])
        entries.append(_entry(path, runs, uses.get(path, ())))
    parts = [wrap_paragraphs(_ABOUT)]
    for heading, by_circumstances in studies.items():
        parts.append(f"## {heading}")
        for about, entries in by_circumstances.items():
            parts += [wrap(about, ""), "\n".join(entries)]
    return relative(INDEX, "\n\n".join(parts) + "\n")


def wrap_paragraphs(text: str) -> str:
    """The text with each of its paragraphs wrapped."""
    return "\n\n".join(wrap(" ".join(paragraph.split()), "") for paragraph in text.strip().split("\n\n"))


def _entry(path: Path, runs: Sequence[Run], pages: Sequence[Path]) -> str:
    users = ", ".join(link(page.relative_to(ROOT).as_posix(), page) for page in pages) or "no page"
    lines = [wrap(f"- {link(path.name, path)}, used by {users}", "  ")]
    # The shards of a run differ in little more than their number.
    for command, run in {run.command: run for run in runs}.items():
        lines.append(wrap(f"    - {run.day}, {recorded_commit(run)}: `{command}`", "      "))
    return "\n".join(lines)


def linked_results(page: Path, targets: Sequence[str]) -> list[Path]:
    """The result files among the targets of a page's links, whether they are there or not."""
    paths = (Path(os.path.normpath(page.parent / target)) for target in targets)
    return [path for path in paths if path.is_relative_to(RESULTS) and path.suffix == ".jsonl"]
