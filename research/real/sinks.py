"""Describes the first token of a text in each layer, and what a window of newest tokens loses without it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from research.real.model import Attend, Llama, causal_attention, newest_weights, window_attention
from research.real.texts import Prompt

NEWEST = 128
"""Number of newest tokens whose queries are observed."""
SINK_MASS = 0.5
"""A head writes with a sink if its weight on the first token reaches this value."""
LEVELS = (0.4, 0.6, 0.8)
"""Weights on the first token at which the other weights are described."""
NEAR = 0.02
"""Maximum distance of a weight from its level."""
WINDOW_TOKENS = 1024
"""Tokens that a window reads, sinks included."""
SINKS = 4
DENSE, WINDOW, WINDOW_SINKS, WINDOW_WORD = "dense", "window", "window_sinks", "window_word"
"""Arms: all tokens; a window; a window and the first four tokens; the same with a word four times before the text."""
ARMS = (DENSE, WINDOW, WINDOW_SINKS, WINDOW_WORD)


class SinkObserver:
    """Dense attention that describes the first token in each layer."""

    def __init__(self, model: Llama) -> None:
        """Observe a forward pass of the model."""
        self.layers: list[dict[str, float]] = []
        """By layer; norms and cosines are means over KV heads."""
        self._model = model
        self._levels = torch.zeros(len(LEVELS), 5, dtype=torch.float64)
        self._stream: torch.Tensor | None = None
        self._mass = torch.empty(0)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `model.Attend`."""
        weights, rows = newest_weights(query[0], key[0], self._model.scale, NEWEST)
        self._mass = weights[..., 0]
        self._count_levels(weights, rows)
        keys, values = key[0].float(), value[0].float()
        grouped = query[0, :, -len(rows) :].unflatten(0, (len(keys), -1)).float()
        about = {
            "mass": self._mass,
            "sink_heads": self._mass >= SINK_MASS,
            "first_key_norm": keys[:, 0].norm(dim=-1),
            "key_norm": keys[:, 1:].norm(dim=-1),
            "first_value_norm": values[:, 0].norm(dim=-1),
            "value_norm": values[:, 1:].norm(dim=-1),
            "query_cosine": F.cosine_similarity(grouped, keys[:, None, None, 0], dim=-1),
        }
        self.layers.append({"layer": layer} | {name: found.float().mean().item() for name, found in about.items()})
        return causal_attention(query, key, value, self._model.scale)

    def project(self, layer: int, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Describe what heads add to the residual stream. Return the attention's addition."""
        found, stream = self.layers[layer], x[0].float()
        weight = self._model.weight(layer, "self_attn.o_proj")
        newest = self._mass.shape[-1]
        rows = output[0, -newest:].float().unflatten(-1, (self._model.num_heads, -1))
        written = torch.einsum("rhd,ohd->hro", rows, weight.float().unflatten(1, (self._model.num_heads, -1)))
        sizes = written.norm(dim=-1) / stream[-newest:].norm(dim=-1)
        aligned = F.cosine_similarity(written, written.sum(dim=0, keepdim=True), dim=-1)
        sinks = self._mass.flatten(0, 1) >= SINK_MASS
        for name, chosen in ("sink", sinks), ("other", ~sinks):
            if chosen.any():
                found[f"{name}_write"] = sizes[chosen].mean().item()
                found[f"{name}_alignment"] = aligned[chosen].mean().item()
        if self._stream is not None:
            cosine = F.cosine_similarity(stream, self._stream, dim=-1)
            found |= {"first_layer_cosine": cosine[0].item(), "layer_cosine": cosine[1:].mean().item()}
        self._stream = stream
        return F.linear(output, weight)

    def levels(self) -> Iterator[dict[str, Any]]:
        """Yield the weights beside the first token's, by level of the first token's weight."""
        for level, (count, *sums) in zip(LEVELS, self._levels.tolist(), strict=True):
            if count:
                names = "mass", "largest_other", "mean_other", "ratio"
                means = {name: float(f"{total / count:.4g}") for name, total in zip(names, sums, strict=True)}
                yield {"level": level, "queries": int(count)} | means

    def _count_levels(self, weights: torch.Tensor, rows: torch.Tensor) -> None:
        mass, others = weights[..., 0], weights[..., 1:]
        largest = others.amax(dim=-1)
        mean = (1 - mass) / rows
        for index, level in enumerate(LEVELS):
            near = (mass - level).abs() <= NEAR
            columns = torch.ones_like(mass), mass, largest, mean, mass / largest
            self._levels[index] += torch.stack([column[near].double().sum() for column in columns]).cpu()


def measure_sinks(model: Llama, texts: Sequence[Prompt], arms: Sequence[str], word: int) -> Iterator[dict[str, Any]]:
    """Yield rows for each text: one per layer, one per level, and the loss of each arm.

    Args:
        model: the model.
        texts: texts to read. Those that fit the window have no loss.
        arms: names in `ARMS`.
        word: token that is put before the text four times.
    """
    for text in texts:
        about = {"study": "sinks", "text": text.name, "kind": text.kind, "context_tokens": text.context_tokens}
        begin, observer = time.monotonic(), SinkObserver(model)
        hidden = model.hidden_of(text.tokens, observer.attend, observer.project)
        for row in observer.layers:
            rounded = {name: round(number, 5) if name != "layer" else number for name, number in row.items()}
            yield about | {"arm": "layer"} | rounded
        for level in observer.levels():
            yield about | {"arm": "level"} | level
        if len(text.tokens) <= WINDOW_TOKENS:
            continue
        for arm in arms:
            before = [word] * SINKS if arm == WINDOW_WORD else []
            if arm == DENSE:
                found = hidden
            else:
                found = model.hidden_of([*before, *text.tokens], _window(model, 0 if arm == WINDOW else SINKS))
            nats = _nats(model, found[len(before) :], text.tokens)
            seconds = round(time.monotonic() - begin, 1)
            yield about | {"arm": arm, "window_tokens": WINDOW_TOKENS, "nats": round(nats, 4), "seconds": seconds}
            begin = time.monotonic()


def _window(model: Llama, sinks: int) -> Attend:
    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return window_attention(query, key, value, model.scale, sinks, WINDOW_TOKENS - sinks)

    return attend


def _nats(model: Llama, hidden: torch.Tensor, tokens: Sequence[int]) -> float:
    """Return the mean loss of the tokens that are predicted after the first one left the window."""
    targets = torch.tensor(tokens[WINDOW_TOKENS + 1 :], device=model.device)
    return model.nats(hidden[WINDOW_TOKENS : len(tokens) - 1], targets)
