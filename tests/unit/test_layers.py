"""Tests of the product do not depend on the measuring code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MEASURING = ("bench", "support.bench")
NIGHTLY = ("nightly/", "support/asker.py", "support/deployments.py", "support/families/")
"""Files of nightly tests, which may share the models and servers of the measuring code."""


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, from anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def measures(name: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in MEASURING)


def files(measuring: bool) -> list[Path]:
    """Files of tests and of what they share. Those of the measuring code are in folders named `bench`."""
    paths = [path.relative_to(TESTS) for path in sorted(TESTS.rglob("*.py"))]
    kept = [path for path in paths if not path.as_posix().startswith(NIGHTLY)]
    return [TESTS / path for path in kept if ("bench" in path.parts) == measuring]


@pytest.mark.parametrize("path", files(measuring=False), ids=lambda path: str(path.relative_to(TESTS)))
def test_only_tests_of_the_measuring_code_import_it(path):
    assert list(filter(measures, imported(path))) == []


def test_tests_of_the_measuring_code_are_found():
    # test_help.py starts commands by name.
    tests = [path for path in files(measuring=True) if path.name.startswith("test_") and path.stem != "test_help"]
    assert all(any(map(measures, imported(path))) for path in tests)
