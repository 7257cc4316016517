"""The messages of a logger of the plugin."""

import logging

import pytest


def said(monkeypatch: pytest.MonkeyPatch, logger: str, level: str) -> list[str]:
    """Collects the lines that a logger writes at a level, such as "warning", in place of logging them."""
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger(logger), level, lambda text, *values: lines.append(text % values))
    return lines
