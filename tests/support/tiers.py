"""Which tests a run takes: quick tests by default, all with `--all`; nightly tests are apart.

Folders, names of files and recorded durations decide, so a test says nothing itself:

    engine    tests/integration: engines of vLLM, and its layers
    compile   tests/kernels: files that compile CUDA or Triton sources
    slow      test functions of which one case took more than `SLOW_SECONDS`, by durations.json

A run that names files or tests, or chooses by `-k` or `-m`, takes what it chooses.

    python -m support.tiers RESULTS.xml     records durations, from `pytest --all --junitxml=RESULTS.xml` (in tests/)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = Path(__file__).parents[1]
DURATIONS = Path(__file__).with_name("durations.json")
SLOW_SECONDS = 0.5
SMOKE = "integration/test_smoke.py"
"""The engine of quick runs."""
_COMPILE = ("test_cuda_", "test_triton_")


def mark(items: list[pytest.Item]) -> None:
    """Mark tests by their tier."""
    slow = json.loads(DURATIONS.read_text(encoding="utf-8"))
    for item in items:
        path = item.path.relative_to(TESTS)
        if path.parts[0] == "integration":
            item.add_marker("engine")
        if path.name.startswith(_COMPILE):
            item.add_marker("compile")
        if item.nodeid.partition("[")[0].removeprefix("tests/") in slow:
            item.add_marker("slow")


def ignores(path: Path, config: pytest.Config) -> bool:
    """Whether a run takes nothing of a folder or file, so that it need not be imported."""
    if chooses(config) or not path.is_relative_to(TESTS) or path == TESTS:
        return False
    relative = path.relative_to(TESTS)
    if config.option.all or relative.as_posix() == SMOKE:
        return False
    return (relative.parts[0] == "integration" and len(relative.parts) > 1) or relative.name.startswith(_COMPILE)


def leaves_out(item: pytest.Item) -> bool:
    """Whether a run without `--all` leaves a test out."""
    config = item.config
    if chooses(config) or config.option.all or item.path == TESTS / SMOKE:
        return False
    return item.get_closest_marker("slow") is not None


def chooses(config: pytest.Config) -> bool:
    """Whether the command line chooses tests."""
    named = any(not Path(argument.partition("::")[0]).is_dir() for argument in config.args)
    return named or bool(config.option.keyword or config.option.markexpr)


def record(results: Path) -> dict[str, float]:
    """Return the seconds of the slowest case of each slow test function, by its name, from a JUnit file."""
    slow: dict[str, float] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        module, name = case.attrib["classname"], case.attrib["name"].partition("[")[0]
        seconds = float(case.attrib["time"])
        if seconds <= SLOW_SECONDS or not module.startswith("tests."):
            continue
        parts = module.split(".")[1:]
        file = next(end for end in range(len(parts), 0, -1) if (TESTS / Path(*parts[:end])).with_suffix(".py").exists())
        node = "::".join([Path(*parts[:file]).with_suffix(".py").as_posix(), *parts[file:], name])
        slow[node] = max(slow.get(node, 0.0), round(seconds, 1))
    return dict(sorted(slow.items()))


if __name__ == "__main__":
    DURATIONS.write_text(json.dumps(record(Path(sys.argv[1])), indent=0) + "\n", encoding="utf-8")
