"""Fills the generated blocks of all pages, and writes the index of results.

python -m bench.pages
python -m bench.pages --check
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from bench.common.options import make_app
from bench.common.results import RESULTS, ROOT, read_runs
from bench.pages.blocks import INDEX, block_names, fill, link, relative, study_of, wrap
from bench.pages.render import blocks
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.tools.arguments import run_app

_COMMAND = "python -m bench.pages"
_PAGES = ("*.md", "docs/**/*.md", "research/*/README.md", "bench/*/README.md", "models/*/README.md")
_TARGET = re.compile(r"\]\(([^()\s#]+)(?:#[^()\s]*)?\)")

_INDEX_HEAD = """\
<!-- Written by `python -m bench.pages`. -->

# Results

All numbers in the pages come from these files, `MACHINE/STUDY/NAME.jsonl`.
The first line of a file describes the run: command, date, commit, versions, hardware (`head -1 FILE`).
Here each file stands with its commits; `-` is a commit that was not recorded.
Each other line is one measurement. Options and modules may have other names today than in a recorded command.
Machines: `cpu-2core` has two cores of a server processor, `h100` and `h200` have one to four NVIDIA H100 or H200.
A `+` after a commit means that the checkout had uncommitted changes.
"""

app = make_app("The generated parts of the pages.")


def find_pages() -> list[Path]:
    """The pages that may hold blocks and links to result files."""
    pages = (page for pattern in _PAGES for page in ROOT.glob(pattern))
    return sorted(page for page in pages if page != INDEX)


def result_files() -> list[Path]:
    """All result files, in order."""
    return sorted(RESULTS.rglob("*.jsonl"))


def is_misplaced(path: Path) -> bool:
    """Whether the path of a result file is not MACHINE/STUDY/NAME.jsonl."""
    return len(path.relative_to(RESULTS).parts) != 3


def render_index() -> str:
    """The index of result files: a list for each study, a file with its commits in each item."""
    studies: dict[str, list[str]] = {}
    for path in result_files():
        commits = (str(run.commit or "-") for run in read_runs(path))
        short = dict.fromkeys(commit.rstrip("+")[:7] + "+" * commit.endswith("+") for commit in commits)
        studies.setdefault(": ".join(study_of(path)), []).append(f"{link(path.stem, path)} {' '.join(short)}")
    parts = [_INDEX_HEAD.strip()]
    for heading, items in studies.items():
        parts += [f"## {heading}", wrap(", ".join(items))]
    return relative(INDEX, "\n\n".join(parts) + "\n")


def find_faults(contents: Mapping[Path, str], blocks: Mapping[str, object]) -> Iterator[str]:
    """Faults of pages and result files that rewriting the blocks cannot repair."""

    def name(path: Path) -> str:
        return path.relative_to(ROOT).as_posix()

    files = result_files()
    for path in files:
        if is_misplaced(path):
            yield f"results: got {name(path)}, allowed: MACHINE/STUDY/NAME.jsonl in {name(RESULTS)}"
    for page, text in contents.items():
        for path in dict.fromkeys(Path(os.path.normpath(page.parent / target)) for target in _TARGET.findall(text)):
            if path.is_relative_to(RESULTS) and path.suffix == ".jsonl" and path not in files:
                yield f"{name(page)}: got a link to {name(path)}, which is not there, allowed: one of {name(INDEX)}"
    used = {block for text in contents.values() for block in block_names(text)}
    for block in blocks:
        if block not in used:
            yield f"blocks: got no page with {block!r}, allowed: one or more"


@app.command()
def pages(check: Annotated[bool, typer.Option("--check", help="Only report outdated pages.")] = False) -> None:
    """Write the blocks of all pages and the index of results; exit code 2 if there are faults."""
    made = {name: cache(make) for name, make in blocks().items()}
    texts = {page: page.read_text(encoding="utf-8") for page in find_pages()}
    contents = {page: fill(page, text, made) for page, text in texts.items()}
    faults = list(find_faults(contents, made))
    if not any(map(is_misplaced, result_files())):
        contents[INDEX] = render_index()
    stale = [path for path, text in contents.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check and stale:
        names = ", ".join(path.relative_to(ROOT).as_posix() for path in stale)
        raise ConfigurationError(f"pages: got {names} out of date, allowed: what `{_COMMAND}` writes")
    for path in stale:
        path.write_text(contents[path], encoding="utf-8")
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if faults:
        raise typer.Exit(2)


def main() -> None:
    """Runs the command line. Bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
