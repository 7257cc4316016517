"""Nightly tests run with `pytest -m nightly` alone: other runs do not collect this folder."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if "nightly" in config.option.markexpr else True
