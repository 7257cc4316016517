"""Brings the files of the repository that the documentation links to into the site.

A page links to a result file or to DESIGN.md by its place in the repository, such as `../DESIGN.md`, so that the link
works where the page is read as a file. mkdocs knows the files below docs/ alone; this adds the others, under
`repository/`. Pages among them are rendered like any other and their own links are followed too.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_TARGET = re.compile(r"(?<=\]\()(?!\w+:|#|/)[^()#\s]+")
"""The target of a Markdown link to a file."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link to outside docs/, beginning with the pages that only the navigation names."""
    docs = Path(config.docs_dir)
    for uri in _uris(config.nav):
        _add(uri, files, config)
    pages = list(files.documentation_pages())
    while pages:
        page = pages.pop()
        for target in _TARGET.findall(page.content_string):
            uri = _resolve(page.src_uri, target, docs)
            added = _add(uri, files, config)
            if added is not None and added.is_documentation_page():
                pages.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to a folder to the README.md in it, which is what a reader of the repository is shown."""
    docs = Path(config.docs_dir)

    def pointed(match: re.Match[str]) -> str:
        uri = _resolve(page.file.src_uri, match[0], docs)
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri)) if (docs / uri).is_file() else match[0]

    return _TARGET.sub(pointed, markdown)


def _uris(nav: object) -> Iterator[str]:
    """The files outside docs/ that the navigation names."""
    if isinstance(nav, str) and nav.startswith("../"):
        yield nav
    elif isinstance(nav, (list, dict)):
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _uris(entry)


def _resolve(src_uri: str, target: str, docs: Path) -> str:
    """The place of a link's target relative to docs/; of a folder that has one, its README.md."""
    uri = posixpath.normpath(posixpath.join(posixpath.dirname(src_uri), target))
    readme = posixpath.join(uri, "README.md")
    return readme if (docs / readme).is_file() else uri


def _add(uri: str, files: Files, config: MkDocsConfig) -> File | None:
    """Adds a file outside docs/; None if there is none or it is there already."""
    if not uri.startswith("../") or files.get_file_from_path(uri) or not (Path(config.docs_dir) / uri).is_file():
        return None
    place = f"repository/{uri.removeprefix('../')}"
    if uri.endswith(".md"):
        name = place.removesuffix(".md").removesuffix("README")
        place = posixpath.join(name, "index.html")
    in_nav = uri in _uris(config.nav)
    level = InclusionLevel.INCLUDED if in_nav else InclusionLevel.NOT_IN_NAV
    file = File(uri, config.docs_dir, config.site_dir, config.use_directory_urls, dest_uri=place, inclusion=level)
    files.append(file)
    return file
