"""Tests of the product do not depend on the measuring code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MEASURING = ("bench", "research")


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, from anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def files(measuring: bool) -> list[Path]:
    return [path for path in sorted(TESTS.rglob("*.py")) if (path.relative_to(TESTS).parts[0] == "bench") == measuring]


@pytest.mark.parametrize("path", files(measuring=False), ids=lambda path: str(path.relative_to(TESTS)))
def test_only_tests_of_the_measuring_code_import_it(path):
    assert [name for name in imported(path) if name.partition(".")[0] in MEASURING] == []


def test_tests_of_the_measuring_code_are_found():
    assert all(any(name.partition(".")[0] in MEASURING for name in imported(path)) for path in files(measuring=True))
