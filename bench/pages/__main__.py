"""Fills the generated blocks of all pages, writes the index of results, and draws the figures.

python -m bench.pages
python -m bench.pages --check
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from bench.common.options import make_app
from bench.common.pages import INDEX, block_names, fill, write_or_check
from bench.common.results import RESULTS, ROOT
from bench.pages import figures
from bench.pages.index import is_misplaced, linked_results, render_index, result_files
from bench.pages.sections import SECTIONS
from vllm_sparse_plugin.cli.arguments import run_app
from vllm_sparse_plugin.errors import ConfigurationError

GENERATORS = ("bench.pages", "bench/update_readme.py")
"""What marks the blocks: today's name, and the one before it."""
_COMMAND = "python -m bench.pages"
_PAGES = ("*.md", "docs/**/*.md", "research/*/README.md", "bench/*/README.md", "models/*/README.md")
_TARGET = re.compile(r"\]\(([^()\s#]+)(?:#[^()\s]*)?\)")

app = make_app("The generated parts of the pages.")


def find_pages() -> list[Path]:
    """The pages that may hold blocks and name result files."""
    pages = (page for pattern in _PAGES for page in ROOT.glob(pattern))
    return sorted(page for page in pages if page != INDEX)


def find_uses(contents: Mapping[Path, str]) -> dict[Path, list[Path]]:
    """The pages that name each result file, which need not be there."""
    uses: dict[Path, list[Path]] = {}
    for page, text in contents.items():
        for path in dict.fromkeys(linked_results(page, _TARGET.findall(text))):
            uses.setdefault(path, []).append(page)
    return uses


def find_faults(contents: Mapping[Path, str], uses: Mapping[Path, list[Path]]) -> Iterator[str]:
    """What is wrong with pages and result files although every block is as it should be."""

    def name(path: Path) -> str:
        return path.relative_to(ROOT).as_posix()

    files = result_files()
    for path in files:
        if is_misplaced(path):
            yield f"results: got {name(path)}, allowed: MACHINE/STUDY/NAME.jsonl in {name(RESULTS)}"
        elif path not in uses:
            yield f"results: got {name(path)}, which no page uses, allowed: files that a page shows or names"
    for path in uses.keys() - set(files):
        yield f"{name(uses[path][0])}: got a link to {name(path)}, which is not there, allowed: one of {name(INDEX)}"
    used = {block for text in contents.values() for block in block_names(text, GENERATORS)}
    for block, section in SECTIONS.items():
        if block not in used and not section.may_be_unused:
            yield f"blocks: got no page with {block!r}, allowed: one or more, unless it may be unused"


@app.command()
def pages(check: Annotated[bool, typer.Option("--check", help="Only say what is out of date.")] = False) -> None:
    """Write the blocks of all pages, the index of results and the figures; exit code 2 where something is wrong."""
    blocks = {name: cache(section.make) for name, section in SECTIONS.items()}
    texts = {page: page.read_text(encoding="utf-8") for page in find_pages()}
    contents = {page: fill(page, text, GENERATORS, blocks) for page, text in texts.items()}
    uses = find_uses(contents)
    faults = list(find_faults(contents, uses))
    if not any(map(is_misplaced, result_files())):
        contents[INDEX] = render_index(uses)
    write_or_check(_COMMAND, contents, check)
    _draw(check)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if faults:
        raise typer.Exit(2)


def _draw(check: bool) -> None:
    """Draw the figures, or refuse those that are out of date."""
    try:
        drawn = {path: figures.draw(make) for path, make in figures.FIGURES.items()}
    except ImportError:
        return  # matplotlib belongs to an extra
    for path, content in drawn.items():
        if check and not figures.is_current(path, content):
            raise ConfigurationError(
                f"figures: got {path.relative_to(ROOT).as_posix()} out of date, allowed: what `{_COMMAND}` draws"
            )
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    run_app(app)


if __name__ == "__main__":
    main()
