"""Blocks about caches that keep a part of a prompt."""

from __future__ import annotations

from bench.common.pages import Block, table
from bench.common.results import RESULTS, Row, read_run

FOLDER = RESULTS / "cpu-2core" / "compaction"
MODELS = ("needle-8m",)
_ASKED = {"inside": "the question ends the prompt", "behind": "the question comes behind the prompt"}


def answers() -> Block:
    """Right answers by model, place of the question, context, budget and method."""
    paths, parts = [FOLDER / f"{model}.jsonl" for model in MODELS], []
    for path in paths:
        rows = read_run(path).rows
        for asked, says in _ASKED.items():
            here = [row for row in rows if row["question"] == asked]
            parts += [f"**{path.stem}, {says}**", _answers_table(here)]
    return Block("\n\n".join(parts), paths)


def _answers_table(rows: list[Row]) -> str:
    dense = {row["context_tokens"]: row for row in rows if row["method"] == "dense"}
    found = {(row["context_tokens"], row["share"], row["setting"]): row for row in rows if row["method"] != "dense"}
    settings = list(dict.fromkeys(setting for *_, setting in found))
    lines = []
    for context, share in sorted({(context, share) for context, share, _ in found}, key=lambda key: (key[0], -key[1])):
        of_methods = (found.get((context, share, setting)) for setting in settings)
        cells = (_right(row) if row else "-" for row in (dense[context], *of_methods))
        lines.append([f"{context:,}", f"1/{1 / share:.0f}", *cells])
    names = (setting.replace("unique", "`unique`, equal bytes") for setting in settings)
    return table(["context", "kept", "dense", *names], lines)


def _right(row: Row) -> str:
    answered = "".join(row["right"].values())
    return f"{answered.count('1')}/{len(answered)}"
