"""Batches of requests that decode at the same time, such as `24x32K` or `16x32K+1x128K:dense`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict

from bench.common.options import parse_size, split_values
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.requests.arguments import BUDGET, DENSE

ALLOWED = "COUNTxCONTEXT, with :dense or :budget=TOKENS, joined by +"


class Requests(BaseModel):
    """Equal requests of a batch."""

    model_config = ConfigDict(frozen=True)

    count: int
    context: int
    arguments: dict[str, Any] = {}
    """Arguments for a sparse backend."""


class Batch(BaseModel):
    """Requests that decode at the same time."""

    model_config = ConfigDict(frozen=True)

    name: str
    parts: tuple[Requests, ...]

    @property
    def count(self) -> int:
        """Requests of the batch."""
        return sum(part.count for part in self.parts)

    @property
    def longest(self) -> int:
        """Tokens of its longest context."""
        return max(part.context for part in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens of all contexts."""
        return sum(part.count * part.context for part in self.parts)

    @property
    def contexts(self) -> list[int]:
        """The context of each request, the longest first."""
        return [part.context for part in self.in_order for _ in range(part.count)]

    @property
    def in_order(self) -> list[Requests]:
        """The parts by context, the longest first."""
        return sorted(self.parts, key=lambda part: -part.context)


def parse_batches(texts: Iterable[str]) -> tuple[Batch, ...]:
    """Parse batches, without duplicates.

    Raises:
        ConfigurationError: for anything else.
    """
    return tuple(_parse(text) for text in dict.fromkeys(split_values(texts)))


def _parse(text: str) -> Batch:
    parts = []
    for part in text.split("+"):
        shape, _, argument = part.partition(":")
        count, _, context = shape.partition("x")
        name, _, value = argument.partition("=")
        try:
            arguments: dict[str, Any] = {}
            if argument == "dense":
                arguments = {DENSE: "dense"}
            elif name == "budget":
                arguments = {BUDGET: parse_size(value)}
            elif argument:
                raise ValueError(f"{argument!r} is not an argument")
            parts.append(Requests(count=parse_size(count), context=parse_size(context), arguments=arguments))
        except ValueError:
            raise ConfigurationError(f"load: got {text!r}, allowed: {ALLOWED}") from None
    return Batch(name=text, parts=tuple(parts))
