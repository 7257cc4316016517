"""Inputs with mistakes for the tests of commands, and the sentence that a command ends with."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "needle-8m"
WHOLE = json.dumps({"prompt": "a b c", "completion": " d"}) + "\n"
HALF = WHOLE[:20]
RESULTS = (json.dumps({"settings": {"label": "x", "decode_from": "prompt"}}) + "\n").encode()
"""A file of `eval` without an answer."""
CONTENTS: dict[str, bytes | None] = {
    "missing": None,
    "empty": b"",
    "half-written": HALF.encode(),
    "not UTF-8": WHOLE.encode("utf-16"),
    "a byte that is not UTF-8": WHOLE.encode() + b'{"prompt": "\xff"}\n',
    "a lone surrogate": b'{"prompt": "a \\ud800 b", "data": ["\\udfff"], "{context} \\ud800": 1}\n',
    "nested": b"[" * 100_000,
}


def pretend(monkeypatch, installed: dict[str, str], missing: str | None = None) -> None:
    """Packages of an extra are there, but for one."""
    find = importlib.util.find_spec

    def found(name: str, *rest: object) -> object:
        return None if name == missing else find(name, *rest) or (name in installed and SimpleNamespace()) or None

    monkeypatch.setattr(importlib.util, "find_spec", found)


def sentence_of(result: tuple[int, str], code: int = 2) -> str:
    """The only line of stderr."""
    assert "Traceback" not in result[1]
    assert (result[0], len(result[1].splitlines())) == (code, 1), result
    return result[1].removeprefix("error: ").rstrip("\n")


def put(name: str, content: bytes | None) -> Path:
    path = Path(name)
    if content is not None:
        path.write_bytes(content)
    return path
