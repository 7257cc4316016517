"""The options that the benchmarks share.

- An option with several values is repeated, or its values are separated by commas: `--variant a --variant b` is
  `--variant a,b`.
- A size is a positive integer, with `K` for 1024: `--context 4K,32K`.
- A grid of decode steps gives the batches of each context: `--grid 8K,32K=1,8 --grid 128K=1`.
- `--output` is the result file, `--time-limit` the seconds that a command may measure, and `--commit` the measured
  commit if the checkout does not know it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ConfigDict

from bench.common.models import SHAPES
from vllm_sparse_plugin.errors import ConfigurationError

Output = Annotated[Path, typer.Option("--output", help="JSON lines to write.")]
TimeLimit = Annotated[
    float, typer.Option("--time-limit", min=1, help="Seconds after which the command ends with its results so far.")
]
Commit = Annotated[str | None, typer.Option("--commit", help="Commit to record if the checkout has no history.")]
ModelName = Annotated[str, typer.Option("--model", help=f"{', '.join(SHAPES)} (random weights), or a folder.")]
Variants = Annotated[list[str], typer.Option("--variant", help="BACKEND or BACKEND:KV_CACHE_DTYPE, repeatable.")]
AdditionalConfig = Annotated[
    str | None, typer.Option("--additional-config", help="For the plugin's backends.", metavar="JSON")
]
EngineArgs = Annotated[str, typer.Option("--engine-args", metavar="JSON", help="Arguments of vllm.LLM.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Repeats of each measurement.")]
NewTokens = Annotated[int, typer.Option("--new-tokens", min=1, help="Tokens of a request per measured time.")]


def usable_device(device: str) -> str:
    """Returns the name of a torch device that works on this machine.

    Raises:
        ConfigurationError: for another device.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigurationError(f"device: got {device!r}, allowed: a device that torch can use here") from None
    return device


def make_app(text: str) -> typer.Typer:
    """A command line with subcommands, described by `text`."""
    return typer.Typer(
        help=text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )


class GridRow(BaseModel):
    """The batches of one context."""

    model_config = ConfigDict(frozen=True)

    context: int
    batches: tuple[int, ...]


def size_text(number: int) -> str:
    """Sizes with K for whole multiples of 1024: 32768 is `32K`."""
    return f"{number // 1024}K" if number % 1024 == 0 and number else str(number)


def parse_size(text: str) -> int:
    """Parse a size such as `8` or `32K`.

    Raises:
        ValueError: if it is not a positive integer.
    """
    digits = text.strip().upper()
    unit = 1024 if digits.endswith("K") else 1
    digits = digits.removesuffix("K")
    if not digits.isdecimal() or int(digits) == 0:
        raise ValueError(f"{text!r} is not a size")
    return int(digits) * unit


def split_values(values: Iterable[str]) -> list[str]:
    """The values of an option that may be repeated and may hold several values separated by commas."""
    return [part.strip() for value in values for part in value.split(",")]


def parse_sizes(option: str, values: Iterable[str]) -> tuple[int, ...]:
    """Parse the sizes of an option, without duplicates.

    Raises:
        ConfigurationError: names the option and the invalid value.
    """
    found = []
    for part in split_values(values):
        try:
            found.append(parse_size(part))
        except ValueError:
            allowed = "positive integers separated by commas, such as 1,8,32K"
            raise ConfigurationError(f"{option}: got {part!r}, allowed: {allowed}") from None
    return tuple(dict.fromkeys(found))


def parse_names(option: str, values: Iterable[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """Parse the names of an option, without duplicates.

    Raises:
        ConfigurationError: names the option and the value that is not allowed.
    """
    names = split_values(values)
    for name in names:
        if name not in allowed:
            raise ConfigurationError(f"{option}: got {name!r}, allowed: {', '.join(allowed)}")
    return tuple(dict.fromkeys(names))


def parse_grid(texts: Iterable[str]) -> tuple[GridRow, ...]:
    """Parse `CONTEXT=BATCH,BATCH,...` values such as `2048=1,6,24` or `8K,128K=1,8`, sorted by context.

    Raises:
        ConfigurationError: for anything else, or a context that appears twice.
    """
    rows: dict[int, GridRow] = {}
    for text in texts:
        contexts, _, batches = text.partition("=")
        try:
            sizes, row = ([parse_size(each) for each in part.split(",")] for part in (contexts, batches))
        except ValueError:
            sizes, row = [], []
        if not sizes or any(sizes.count(size) > 1 or size in rows for size in sizes):
            raise ConfigurationError(
                f"grid: got {text!r}, allowed: CONTEXT=BATCH,... once for each context, such as 32K=1,8"
            )
        rows |= {size: GridRow(context=size, batches=tuple(row)) for size in sizes}
    return tuple(rows[context] for context in sorted(rows))
