"""Recipes of one arm that differ in rank, rate and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from bench.common.arms import Recipe, recipe_of
from bench.common.options import split_values
from bench.common.results import Row
from vllm_sparse_plugin.errors import ConfigurationError

_Number = TypeVar("_Number", int, float)


def finished(rows: Sequence[Row]) -> set[Recipe | str]:
    """Return the recipes whose last part is in a result file."""
    return {recipe_of(row) for row in rows if row.get("part") == "questions"}


def parse_numbers(option: str, text: str, number: Callable[[str], _Number]) -> tuple[_Number, ...]:
    """Parse numbers separated by commas.

    Raises:
        ConfigurationError: names the option and what is no number.
    """
    try:
        return tuple(map(number, split_values([text])))
    except ValueError:
        raise ConfigurationError(f"{option}: got {text!r}, allowed: numbers separated by commas") from None
