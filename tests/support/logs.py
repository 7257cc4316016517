"""What a logger of ours says."""

import logging

import pytest


def said(monkeypatch: pytest.MonkeyPatch, logger: str, level: str) -> list[str]:
    """The lines that a logger writes at a level, such as "warning", from now on, in place of the log."""
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger(logger), level, lambda text, *values: lines.append(text % values))
    return lines
