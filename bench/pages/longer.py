"""The block about a model that was trained for a longer context, from the results of `research.training longer`."""

from __future__ import annotations

from pathlib import Path

from bench.common.arms import PLAIN, POSITIONS, QUESTIONS, longer_parts, mean_text
from bench.common.pages import Block, table
from bench.common.results import RESULTS, read_rows

FOLDER = RESULTS / "h100" / "training-longer"
_NOTHING = "Nothing has been measured on a GPU yet."
_TITLES = {QUESTIONS: "RULER", POSITIONS: "nats"}


def longer_files() -> list[Path]:
    """The result files of `research.training longer`; empty if not measured."""
    return sorted(FOLDER.glob("*.jsonl"))


def longer() -> Block:
    """RULER by context and budget, and the loss of texts by position, of each arm."""
    files = longer_files()
    if not files:
        return Block(_NOTHING)
    rows = read_rows(files)
    parts = longer_parts(rows)
    arms = list(dict.fromkeys(arm for part in _TITLES for arm, _ in parts[part]))
    lines = []
    for part, title in _TITLES.items():
        for column in dict.fromkeys(column for _, column in parts[part]):
            found = (parts[part].get((arm, column)) for arm in arms)
            lines.append([f"{title}, {column}", *(mean_text(values, PLAIN) for values in found)])
    sizes = [f"{row['bytes'] / 1e6:.1f} MB" for row in rows if row.get("part") == "update"]
    text = f"\n\nThe update has {sizes[-1]}." if sizes else ""
    return Block(table(["", *(f"`{arm}`" for arm in arms)], lines) + text, files)
