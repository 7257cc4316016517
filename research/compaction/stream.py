"""Perplexity of a long text that is read through a window, with and without its first tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.common.models import library_tokens
from bench.common.results import Row
from research.prefill.pipeline import Prefiller, attend_visible

_CHUNK = 512
"""Tokens that pass through the model at a time; each has a window of its own."""


@dataclass(frozen=True)
class Window:
    """What a token reads: the first tokens and the newest."""

    name: str
    sink_tokens: int
    cache_tokens: int
    """Of the cache, the sinks included; 0 for everything."""
    rolls: bool = False
    """Whether positions are counted within the cache, as the paper has them, and not within the text."""


def windows(cache_tokens: int, sink_tokens: int) -> list[Window]:
    """What is compared."""
    return [
        Window("sinks, true positions", sink_tokens, cache_tokens),
        Window("sinks, rolling positions", sink_tokens, cache_tokens, rolls=True),
        Window("no sinks", 0, cache_tokens),
    ]


def read_text(tokenizer: Any, tokens: int, seed: int) -> list[int]:
    """The first tokens of a stretch of the interpreter's library."""
    return library_tokens(tokenizer, seed * 1_000_003, tokens + 1)


def rotate(x: torch.Tensor, by: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Turns rotary queries or keys by further positions.

    Args:
        x: `[..., num_tokens, head_size]`.
        by: `[num_tokens]`, positions to add.
        frequencies: `[head_size / 2]`, of the model.
    """
    angle = by[:, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class StreamingModel(Prefiller):
    """A model that reads a text through a window."""

    @torch.inference_mode()
    def losses(self, tokens: Sequence[int], window: Window) -> Iterator[torch.Tensor]:
        """Negative log probabilities of the tokens behind the first, in float32, some at a time."""
        newest = window.cache_tokens - window.sink_tokens
        frequencies = self._model.model.rotary_emb.inv_freq
        past: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        where = torch.zeros(0, dtype=torch.int64, device=self.device)
        for begin in range(0, len(tokens) - 1, _CHUNK):
            ids = torch.tensor([tokens[begin : min(begin + _CHUNK, len(tokens) - 1)]], device=self.device)
            position = begin + torch.arange(ids.shape[1], device=self.device)
            where = torch.cat([where, position])
            # A token outside the window of the first query is outside that of all, the sinks aside.
            kept = (where < window.sink_tokens) | (where > begin - newest)
            where = where[kept]
            is_sink = where < window.sink_tokens
            visible = (where <= position[:, None]) & (is_sink | (where > position[:, None] - newest))

            def attend(
                layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
                position: torch.Tensor = position, kept: torch.Tensor = kept, is_sink: torch.Tensor = is_sink,
                visible: torch.Tensor = visible,
            ) -> torch.Tensor:  # fmt: skip
                if layer in past:
                    keys, values = (
                        torch.cat([old, new], 2) for old, new in zip(past[layer], (keys, values), strict=True)
                    )
                keys, values = keys[:, :, kept], values[:, :, kept]
                past[layer] = keys, values
                if not window.rolls:
                    return attend_visible(query, keys, values, visible)
                # Seen from a cache that is full, the sinks lie directly before the window.
                nearer = (position - (window.cache_tokens - 1)).clamp(min=0)
                return attend_rolling(
                    query, rotate(query, -nearer.float(), frequencies), (keys, values), is_sink, visible
                )

            likely = self._logits(self._hidden(ids, begin, attend))[0].log_softmax(dim=-1)
            following = torch.tensor(tokens[begin + 1 : begin + 1 + ids.shape[1]], device=self.device)
            yield -likely.gather(1, following[:, None])[:, 0].cpu()


def attend_rolling(
    query: torch.Tensor, to_sinks: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], is_sink: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Attention whose logits on the sinks are those of other queries.

    Args:
        query: `[1, num_kv_heads, group, num_queries, head_size]`.
        to_sinks: the same queries at the positions that sinks are seen from.
        cache: keys and values, `[1, num_kv_heads, num_tokens, head_size]`.
        is_sink: `[num_tokens]` bool.
        visible: `[num_queries, num_tokens]` bool.
    """
    keys, values = (x[0, :, None] for x in cache)
    of_window, of_sinks = (x[0] @ keys.transpose(-1, -2) for x in (query, to_sinks))
    logits = torch.where(is_sink, of_sinks, of_window) * query.shape[-1] ** -0.5
    output: torch.Tensor = logits.masked_fill(~visible, -torch.inf).softmax(dim=-1) @ values
    return output[None]


def perplexities(model: StreamingModel, tokens: Sequence[int], window: Window, part_tokens: int) -> list[float]:
    """Perplexity of each part of a text."""
    losses = torch.cat(list(model.losses(tokens, window)))
    return [round(math.exp(part.mean().item()), 3) for part in losses.split(part_tokens)]


def measure(model: StreamingModel, tokens: Sequence[int], window: Window, part_tokens: int) -> Row:
    """The row of a window."""
    return {
        "window": window.name,
        "sink_tokens": window.sink_tokens,
        "cache_tokens": window.cache_tokens,
        "part_tokens": part_tokens,
        "perplexity": perplexities(model, tokens, window, part_tokens),
    }
