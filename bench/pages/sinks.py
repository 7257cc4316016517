"""Blocks about the first token of a pretrained model, from the study `sinks` of `research.real`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from bench.common.pages import Block, table
from bench.common.results import RESULTS, Row, read_run

SINKS = RESULTS / "cpu-2core" / "real" / "sinks.jsonl"
_LAYER, _LEVEL = "layer", "level"
ESSAYS = "prose"
_KINDS = {ESSAYS: "essays", "code": "code"}
WINDOWS = {
    "dense": "all tokens",
    "window": "the newest 1,024",
    "window_sinks": "the first 4, the newest 1,020",
    "window_word": "“the” four times before the text, the newest 1,020",
}
"""Arms, and what they read."""
_PARTS = 3
"""Parts of the layers, in order."""
_COLUMNS = {
    "weight": ["mass"],
    "key norm, first / others": ["first_key_norm", "key_norm"],
    "value norm, first / others": ["first_value_norm", "value_norm"],
    "cosine of query and first key": ["query_cosine"],
    "write, sink heads / others": ["sink_write", "other_write"],
    "cosine of layers, first / others": ["first_layer_cosine", "layer_cosine"],
}
"""Headings of the table, and columns of the results."""


def layers() -> Block:
    """The first token of the longest contexts by part of the layers."""
    rows = layer_rows(max(row["context_tokens"] for row in layer_rows()))
    count = max(row["layer"] for row in rows) + 1
    lines = []
    for part in range(_PARTS):
        first, end = part * count // _PARTS, (part + 1) * count // _PARTS
        found = [row for row in rows if first <= row["layer"] < end]
        cells = (" / ".join(_cell(mean_of(found, name)) for name in names) for names in _COLUMNS.values())
        lines.append([f"{first} to {end - 1}", *cells])
    return Block(table(["layers", *_COLUMNS], lines), [SINKS])


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:#.3g}"


def windows() -> Block:
    """The loss of text beyond a window by what is read."""
    rows = _window_rows()
    found = [
        (kind, context)
        for context in sorted({row["context_tokens"] for row in rows})
        for kind in _KINDS
        if _of_arm(rows, next(iter(WINDOWS)), context, kind)
    ]
    lines = []
    for arm, name in WINDOWS.items():
        losses = (mean_of(_of_arm(rows, arm, context, kind), "nats") for kind, context in found)
        lines.append([name, *(f"{nats:.2f} ({math.exp(nats):.1f})" for nats in losses)])
    headings = (f"{_KINDS[kind]}, {context:,} tokens" for kind, context in found)
    return Block(table(["each token reads", *headings], lines), [SINKS])


def layer_rows(context: int | None = None) -> list[Row]:
    """Rows of all layers and essays, of one context or of all."""
    rows = whole_texts([row for row in read_run(SINKS).rows if row["arm"] == _LAYER])
    return [row for row in rows if row["kind"] == ESSAYS and context in (None, row["context_tokens"])]


def whole_texts(rows: Sequence[Row]) -> list[Row]:
    """The rows of the texts that have every layer: a run that is out of time may end between two of them."""
    layers: dict[str, set[int]] = {}
    for row in rows:
        layers.setdefault(row["text"], set()).add(row["layer"])
    every = set[int]().union(*layers.values())
    return [row for row in rows if layers[row["text"]] == every]


def level_mean(level: float, context: int, column: str) -> float:
    """The mean of a column among queries of essays with a weight on the first token."""
    rows = [row for row in _of_arm(read_run(SINKS).rows, _LEVEL, context, ESSAYS) if row["level"] == level]
    total: float = sum(row["queries"] * row[column] for row in rows)
    count: int = sum(row["queries"] for row in rows)
    return total / count


def perplexity(arm: str, context: int) -> float:
    """The perplexity of essays in an arm."""
    return math.exp(mean_of(_of_arm(_window_rows(), arm, context, ESSAYS), "nats"))


def _window_rows() -> list[Row]:
    """Losses of the texts that every arm has read."""
    rows = [row for row in read_run(SINKS).rows if row["arm"] in WINDOWS]
    return [row for row in rows if len([each for each in rows if each["text"] == row["text"]]) == len(WINDOWS)]


def _of_arm(rows: Iterable[Row], arm: str, context: int, kind: str) -> list[Row]:
    return [row for row in rows if (row["arm"], row["context_tokens"], row["kind"]) == (arm, context, kind)]


def mean_of(rows: Iterable[Row], column: str) -> float:
    """The mean of a column among the rows that have it, NaN if none has."""
    found: list[float] = [row[column] for row in rows if column in row]
    return sum(found) / len(found) if found else math.nan
