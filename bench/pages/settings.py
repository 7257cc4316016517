"""Blocks about the configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from sparse_kernels.page_statistics import StatisticsLayout

from bench.pages.blocks import Block, table
from vllm_sparse_plugin.config import describe_fields, resolve
from vllm_sparse_plugin.config.routing import CUBIC, THRESHOLD

_HEAD_SIZE = 128
_OWNERS = re.compile(r"(\w+(, \w+)*): ")
"""Names of the policies or methods with a setting, before its description."""
_NUMBERS = {"integer": "int", "number": "float"}
_RANGE = re.compile(r"an? (integer|number) from (\S+) to (\S+)")


def configuration() -> Block:
    """Every field of the configuration: a table for each section, a row for each key."""
    sections: dict[str, dict[tuple[str, str], list[tuple[str, str, str]]]] = {}
    for name, allowed, default, text in describe_fields():
        section, _, key = name.rpartition(".")
        owners, _, meaning = text.partition(": ") if _OWNERS.match(text) else ("", "", text)
        sections.setdefault(section, {}).setdefault((key, allowed), []).append((_value(default), owners, meaning))
    parts = []
    for section, keys in sections.items():
        rows = [["key", "type", "default", "meaning"], ["---"] * 4]
        rows += [[f"`{key}`", _kind(allowed), *_merged(variants)] for (key, allowed), variants in keys.items()]
        # Without outer bars, the page stays short enough to read.
        parts += [f"### `{section}`" if section else "### Top level", "\n".join(map(" | ".join, rows))]
    return Block("\n\n".join(parts))


def _merged(variants: Sequence[tuple[str, str, str]]) -> list[str]:
    """Default and meaning of a key that models of a section may define differently."""
    defaults, owners, meanings = zip(*variants, strict=True)
    one_meaning = len(set(meanings)) == 1
    if len(set(defaults)) > 1:
        default = ", ".join(f"`{default}` ({owner})" for default, owner, _ in variants)
        if one_meaning:  # the default names every owner
            return [default, meanings[0]]
    else:
        default = f"`{defaults[0]}`"
    if one_meaning:
        owners = (", ".join(filter(None, owners)),)
    sentences = (
        f"*{owner}:* {meaning}" if owner else meaning for owner, meaning in zip(owners, meanings, strict=False)
    )
    return [default, " ".join(sentences)]


def _kind(allowed: str) -> str:
    """The type of a key in few words. Lists are explained in its meaning."""
    if allowed in (THRESHOLD, CUBIC):
        allowed = allowed.partition(",")[0]
    number = _RANGE.fullmatch(allowed)
    if number is None:
        return allowed.removeprefix("a ")
    least, most = (f"{float(end):,.10g}" for end in number.groups()[1:])
    return f"{_NUMBERS[number[1]]} {least} to {most}"


def _value(default: object) -> str:
    return default if isinstance(default, str) else json.dumps(default, default=str)


def statistics_memory() -> Block:
    """Memory of page statistics relative to the cache, by policy and format."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for preset, formats in (
        ("unique", ("quarters", "leveled_quarters", "sketch", "int8", "fp8", "bf16")),
        ("quest", ("int8", "bf16")),
        ("infllm", ("int8", "bf16")),
    ):
        for statistics in formats:
            selection = resolve({"selection": {"statistics": statistics}}, preset).selection
            cells = []
            for itemsize in (2, 1):
                layout = selection.statistics_layout(_HEAD_SIZE, itemsize)
                assert isinstance(layout, StatisticsLayout)
                cells += [f"{layout.memory_overhead:.2%}", str(layout.unit_tokens)]
            rows.setdefault((f"`{preset}`", *cells), []).append(f"`{statistics}`")
    headings = ["policy", "statistics", "16-bit cache: added", "block size", "8-bit cache: added", "block size"]
    return Block(table(headings, ([policy, ", ".join(formats), *cells] for (policy, *cells), formats in rows.items())))
