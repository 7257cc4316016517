"""The renderer of blocks that `tables.yaml` and `papers.yaml` specify.

A block has `files`, patterns below `results/`, and a filter `where`. A table has `lines`, which name its lines by the
columns of rows, `columns`, the cells of each line, and `order`, the headings or columns to sort by. A list of unlike
lines has `headings`, and `rows` with files, a filter and cells of their own. A row about a paper has `result`, `paper`,
`here` and `verdict`; what was run follows from its files.

A cell is a text with expressions of `numbers.py`, each with a format: `{last ms:.2f}`. A format that ends with `~` adds
the interval.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from bench.common.options import size_text
from bench.common.results import RESULTS, Row
from bench.pages import settings
from bench.pages.blocks import Block, table
from bench.pages.labels import AGAIN, Rows, budget_of, describe, text_of
from bench.pages.numbers import chosen, column_of, evaluate, parse_filter, rows_of
from vllm_sparse_plugin.errors import ConfigurationError

Spec = Mapping[str, Any]
_MISSING = "-"
_FIELD = re.compile(r"\{(.+?)(?::([^:}]*))?\}")
_NUMBERS = re.compile(r"(\d+(?:,\d{3})*(?:\.\d+)?)")


def load_specs() -> dict[str, Spec]:
    """The specification of each block of measurements."""
    folder = Path(__file__).parent
    return {
        name: spec
        for file in ("tables.yaml", "papers.yaml")
        for name, spec in yaml.safe_load((folder / file).read_text(encoding="utf-8")).items()
    }


def blocks() -> dict[str, Callable[[], Block]]:
    """A function for each block of the pages."""
    made: dict[str, Callable[[], Block]] = {
        "configuration": settings.configuration,
        "statistics-memory": settings.statistics_memory,
    }
    return made | {name: partial(render, spec) for name, spec in load_specs().items()}


def files_of(spec: Spec) -> list[str]:
    """The patterns of result files of a block or of a line; one pattern may be a text."""
    files = spec.get("files", [])
    own = [files] if isinstance(files, str) else list(files)
    return own + [file for row in spec.get("rows", ()) for file in files_of(row)]


def paths_of(files: Sequence[str]) -> list[Path]:
    """The result files of patterns, in their order."""
    return list(dict.fromkeys(path for pattern in files for path in sorted(RESULTS.glob(f"{pattern}.jsonl"))))


def render(spec: Spec) -> Block:
    """The block of a specification."""
    text = table(spec["headings"], map(line_text, spec["rows"])) if "rows" in spec else _table(spec)
    return Block(text, paths_of(files_of(spec)))


def _rows(spec: Spec) -> list[Row]:
    return chosen(rows_of(paths_of(files_of(spec))), parse_filter(shlex.split(spec.get("where", ""))))


def line_text(spec: Spec) -> list[str]:
    """The cells of a line of a list.

    Raises:
        ConfigurationError: a number has no rows.
    """
    rows = _rows(spec)
    cells = spec.get("cells") or [
        *(spec["result"], spec["paper"], spec.get("here", "not measured")),
        *(describe(rows) if rows else "", spec["verdict"]),
    ]
    texts = [_cell(cell, rows, rows) for cell in cells]
    if None in texts:
        raise ConfigurationError(f"blocks: got no row for {cells[texts.index(None)]!r}, allowed: numbers of its files")
    return [text for text in texts if text is not None]


def _table(spec: Spec) -> str:
    every = _rows(spec)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in every:
        names = [_name(name, row) for name in spec["lines"].values()]
        if None not in names:
            groups.setdefault(tuple(map(str, names)), []).append(row)

    def place(names: tuple[str, ...]) -> list[Any]:
        return [_place(spec, key, names, groups[names][0]) for key in spec.get("order", ())]

    lines = [
        [*names, *(_cell(cell, groups[names], every) or _MISSING for cell in spec["columns"].values())]
        for names in sorted(groups, key=place)
    ]
    return table([*spec["lines"], *spec["columns"]], lines)


def _place(spec: Spec, key: str, names: Sequence[str], row: Row) -> Any:
    """What a line is sorted by: the place among given names, or the texts and numbers in its name or column."""
    headings = list(spec["lines"])
    if key not in headings:
        return column_of(row, key)
    name, given = names[headings.index(key)], spec["lines"][key]
    if isinstance(given, dict):
        return list(given["names"].values()).index(name)
    return [
        (True, float(part.replace(",", ""))) if _NUMBERS.fullmatch(part) else (False, part)
        for part in _NUMBERS.split(name)
        if part
    ]


def _cell(cell: str, rows: Rows, every: Rows) -> str | None:
    """The text of a cell; None if a number has no rows."""

    def number(expression: str, form: str) -> str | None:
        found, plain = evaluate(expression, rows, every), form.removesuffix("~")
        if found is None:
            return None
        interval = f" [{found.low:{plain}}, {found.high:{plain}}]" if form != plain else ""
        return f"{found.value:{plain}}{interval}"

    return _fill(cell, number)


def _name(name: str | Spec, row: Row) -> str | None:
    """Names the line of a row; None if the row has no line, as a dense row that others are compared with."""
    if not isinstance(name, str):
        value = next((row[column] for column in name["column"].split() if column in row), None)
        named: str | None = name["names"].get(value)
        return named

    def part(column: str, form: str) -> str | None:
        value = _COMPUTED[column](row) if column in _COMPUTED else column_of(row, column)
        if value is None:
            return None
        return size_text(int(value)) if form == "K" else format(value, form)

    return _fill(name, part)


def _fill(text: str, part: Callable[[str, str], str | None]) -> str | None:
    """Replaces each `{NAME:FORMAT}` of a text; None if one has no value."""
    found = {match[0]: part(match[1], match[2] or "") for match in _FIELD.finditer(text)}
    if None in found.values():
        return None
    return _FIELD.sub(lambda match: str(found[match[0]]), text)


def _load(row: Row) -> str:
    """Describes the requests of a load: `8x32K+1x128K:dense` is `8 of 32K, 1 of 128K (dense)`."""
    parts = []
    for part in str(row.get("load") or f"{row['batch']}x{size_text(row['context_tokens'])}").split("+"):
        shape, _, argument = part.partition(":")
        count, _, context = shape.partition("x")
        parts.append(f"{count} of {context}{f' ({argument})' if argument else ''}")
    return ", ".join(parts)


def _cache(row: Row) -> str:
    dtype = "bf16" if row["kv_cache_dtype"] == "auto" else row["kv_cache_dtype"]
    return f"{dtype}, {text_of(row).partition(',')[0]}"


def _prompt(row: Row) -> str:
    cached = f", {round(row['cached_tokens'] / 1024)}K of them cached" if row["measurement"] == "prefix_hit" else ""
    return f"{row['context_tokens']:,}{cached}"


def _setting_name(row: Row) -> str | None:
    """The first word of a setting."""
    return None if row["setting"] == AGAIN else f"`{row['setting'].partition('-')[0]}`"


def _setting_tokens(row: Row) -> str:
    """The number in a setting."""
    tokens = str(row["setting"]).partition("-")[2]
    return f"{int(tokens):,}" if tokens.isdigit() else "preset"


def _budget(row: Row) -> str:
    if "section" in row:
        return f"{row['section']['selection']['budget_tokens']:,}"
    return budget_of(row).removesuffix(" tokens") or "dense"


_COMPUTED: Mapping[str, Callable[[Row], str | None]] = {
    "load_text": _load, "cache_text": _cache, "prompt_text": _prompt, "budget_text": _budget,
    "setting_name": _setting_name, "setting_tokens": _setting_tokens,
    "setting_text": lambda row: f"{_setting_name(row)}, {_setting_tokens(row)}".removesuffix(", preset"),
}  # fmt: skip
"""What a name may hold besides columns."""
