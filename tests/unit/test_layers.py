"""Tests of the product do not depend on the measuring code."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
MEASURING = ("bench", "support.bench")
ENGINES = ("nightly/", "support/asker.py", "support/deployments.py", "support/families/", "support/gpu_engines.py")
"""Files of nightly and GPU tests, which may share the models, servers and engines of the measuring code."""


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, from anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_only_tests_of_the_measuring_code_import_it():
    paths = {path: path.relative_to(TESTS) for path in TESTS.rglob("*.py")}
    importing = {
        relative.as_posix()
        for path, relative in paths.items()
        if any(f"{name}.".startswith(f"{package}.") for package in MEASURING for name in imported(path))
    }
    assert importing
    assert [name for name in sorted(importing) if not name.startswith(ENGINES) and "bench/" not in name] == []
