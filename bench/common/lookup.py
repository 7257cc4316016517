"""A model with constructed weights that looks tokens up, so that the right answers of any context are known.

Nothing is trained. In the first layer each token copies the code of the token before it, by its rotary position. In
every other layer, each head finds the token that once followed the current one, and copies its code to the answer:
after `... k a b ... k` the model continues with `a b`. Only loud tokens are looked up. The others are filler, whose
codes are quiet. A head that reads the wrong tokens adds nothing to the answer. If more than `TOLERATED` of the heads
do, the model says `LOST`.

The hidden state has four parts, each of one head: the token's own code, the code of the token before it, the answer,
and constants. The constants are so large that RMSNorm divides all tokens by nearly the same number, a power of two. The
answer is a sum of powers of two, so bfloat16 holds it exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common.models import SHAPES, Model
from vllm_sparse_plugin.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

VOCABULARY = 8192
LOST = 0
"""The token of the model when heads have not found what they look for."""
GROUP = 32
"""Tokens of a group. Their codes are orthogonal in every head, so the mean of a page shows each of them alike."""
LOUD = range(GROUP, 65 * GROUP)
"""Tokens that occur in needles only. The tokens behind them are filler. A needle has tokens of one group."""
TOLERATED = 1 / 64
"""Share of the heads that may read wrong tokens without a change of the answer, within a rounding of bfloat16."""
HEAD_SIZES = (64, 128)
_ROTARY = GROUP
"""Elements of a head that positions rotate. The others match codes: all but one piece of as many elements."""
_THETA = 5.0
"""Sixteen frequencies from 1 down to 0.2: over a million positions, no distance looks like a distance of one."""
_POSITION_SCORE = 24.0
"""Score of each frequency at a distance of one. A distance of zero or two loses 2.5 of 16, any other 3.7."""
_MATCH_SCORE = 128.0
_QUIET = 1 / 8
_CONSTANT = 7.875
_RMS = 4.0
"""Root mean square of the hidden state of a loud token after a loud one, within 0.2 %."""
_LAYER_SHARE = 2.0**-7
"""What each layer adds to the answer."""
_LOGIT = 32.0
"""Of an answer, to the nearest power of two."""
_SEED = 0


@dataclass(frozen=True)
class Shape:
    """The shape of a lookup model. Every layer has keys and values that decide the answer.

    Raises:
        ConfigurationError: for a shape that is not served.
    """

    layers: int = 4
    kv_heads: int = 8
    group: int = 1
    """Query heads of each KV head."""
    head_size: int = 128

    def __post_init__(self) -> None:
        if self.layers < 2:
            raise ConfigurationError(f"layers: got {self.layers}, allowed: 2 or more")
        if self.head_size not in HEAD_SIZES:
            raise ConfigurationError(f"head_size: got {self.head_size}, allowed: {' or '.join(map(str, HEAD_SIZES))}")

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Needle:
    """Tokens that a document holds once, one after the other."""

    position: int
    """Of the first token."""
    tokens: tuple[int, ...]

    @property
    def key(self) -> int:
        """The token to ask with."""
        return self.tokens[0]

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens that the model then continues with."""
        return self.tokens[1:]


@dataclass(frozen=True)
class Document:
    """Filler with needles."""

    tokens: list[int]
    needles: tuple[Needle, ...]


def draw_document(length: int, needles: int, answer_tokens: int, seed: int) -> Document:
    """Draws filler with needles at even distances from the start to the end.

    Args:
        length: in tokens.
        needles: two or more.
        answer_tokens: of each needle, after its key.
        seed: documents of different seeds have different needles.

    Raises:
        ConfigurationError: the needles do not fit.
    """
    import torch

    size, groups = 1 + answer_tokens, len(LOUD) // GROUP
    if not 2 <= needles <= groups:
        raise ConfigurationError(f"needles: got {needles}, allowed: from 2 to {groups}")
    if not 2 <= size <= GROUP:
        raise ConfigurationError(f"answer_tokens: got {answer_tokens}, allowed: from 1 to {GROUP - 1}")
    if length <= needles * size:
        raise ConfigurationError(
            f"context: got a document of {length} tokens, allowed: more than those of its needles, {needles * size}"
        )
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(LOUD.stop, VOCABULARY, (length,), generator=generator)
    chosen = torch.randperm(groups, generator=generator)[:needles].tolist()
    placed = []
    for index in range(needles):
        # The first token follows none, and would look like its own successor.
        position = 1 + index * (length - 1 - size) // (needles - 1)
        order = torch.randperm(GROUP, generator=generator)[:size]
        loud = LOUD.start + chosen[index] * GROUP + order
        tokens[position : position + size] = loud
        placed.append(Needle(position, tuple(loud.tolist())))
    return Document(tokens.tolist(), tuple(placed))


def make_config(shape: Shape, longest: int) -> dict[str, Any]:
    """The config.json of a lookup model for contexts of up to `longest` tokens."""
    return SHAPES["llama-3.1-8b"] | {
        "bos_token_id": None, "eos_token_id": None, "head_dim": shape.head_size, "hidden_size": 4 * shape.head_size,
        "intermediate_size": 4 * shape.head_size, "max_position_embeddings": longest,
        "num_attention_heads": shape.heads, "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads, "rms_norm_eps": 1e-6, "vocab_size": VOCABULARY,
        "rope_parameters": {
            "partial_rotary_factor": _ROTARY / shape.head_size, "rope_theta": _THETA, "rope_type": "default",
        },
    }  # fmt: skip


def save_lookup(folder: Path, shape: Shape, longest: int) -> Model:
    """Writes a lookup model for contexts of up to `longest` tokens to a folder that exists."""
    import torch
    from safetensors.torch import save_file

    config = make_config(shape, longest)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in make_weights(shape)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return Model(folder, False, config)


def make_weights(shape: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name and the float64 values of each weight, which are the same at each call."""
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    size, hidden = shape.head_size, 4 * shape.head_size
    current, answer = slice(0, size), slice(2 * size, 3 * size)
    codes = _codes(size, generator)
    embedding = torch.zeros(VOCABULARY, hidden, dtype=torch.float64)
    embedding[:, current], embedding[:, 3 * size :] = codes, _CONSTANT
    yield "model.embed_tokens.weight", embedding

    for layer in range(shape.layers):
        for name, weight in _attention(shape, layer, generator).items():
            yield f"model.layers.{layer}.self_attn.{name}_proj.weight", weight
        for name, rows, columns in (("gate", hidden, hidden), ("up", hidden, hidden), ("down", hidden, hidden)):
            zeros = torch.zeros(rows, columns, dtype=torch.float64)
            yield f"model.layers.{layer}.mlp.{name}_proj.weight", zeros
        for norm in ("input", "post_attention"):
            yield f"model.layers.{layer}.{norm}_layernorm.weight", torch.ones(hidden, dtype=torch.float64)

    agreeing = size * (shape.layers - 1) * _LAYER_SHARE / _RMS
    scale = 2.0 ** round(math.log2(_LOGIT / agreeing))
    head = torch.zeros(VOCABULARY, hidden, dtype=torch.float64)
    head[:, answer] = codes * scale
    head[LOST, 3 * size] = (1 - TOLERATED) * agreeing * scale * _RMS / _CONSTANT
    yield "lm_head.weight", head
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.float64)


def _signs(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random numbers of -1 and 1."""
    import torch

    return torch.randint(0, 2, shape, generator=generator, dtype=torch.float64) * 2 - 1


def _codes(size: int, generator: torch.Generator) -> torch.Tensor:
    """The codes of all tokens: `[VOCABULARY, size]`. Those of `LOST` and of its group are zero."""
    import torch

    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < GROUP:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    groups, pieces = len(LOUD) // GROUP, size // GROUP
    orders = torch.stack([torch.randperm(GROUP, generator=generator) for _ in range(pieces)], 1)
    loud = hadamard[orders] * _signs(generator, groups, 1, pieces, GROUP)
    quiet = _signs(generator, VOCABULARY - LOUD.stop, size) * _QUIET
    return torch.cat([torch.zeros(LOUD.start, size, dtype=torch.float64), loud.view(len(LOUD), size), quiet])


def _attention(shape: Shape, layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The weights of the projections q, k, v and o of a layer."""
    import torch

    size = shape.head_size
    current, before, answer, constant = 0, size, 2 * size, 3 * size
    q = torch.zeros(shape.heads, size, 4 * size, dtype=torch.float64)
    k, v = (torch.zeros(shape.kv_heads, size, 4 * size, dtype=torch.float64) for _ in range(2))
    o = torch.zeros(4 * size, shape.heads, size, dtype=torch.float64)
    frequencies = _THETA ** -(torch.arange(0, _ROTARY, 2, dtype=torch.float64) / _ROTARY)
    for head in range(shape.kv_heads):
        queries = slice(head * shape.group, (head + 1) * shape.group)
        # Each head stores codes in an order and with signs of its own.
        order = torch.randperm(size, generator=generator)
        signs = _signs(generator, size)
        if layer == 0:
            half, score = _ROTARY // 2, _POSITION_SCORE * math.sqrt(size)
            q[queries, :half, constant] = frequencies.cos() * score * _RMS / _CONSTANT
            q[queries, half:_ROTARY, constant] = -frequencies.sin() * score * _RMS / _CONSTANT
            k[head, :half, constant] = _RMS / _CONSTANT
            target, share = before, 1 / shape.heads
        else:
            rows = torch.arange(_ROTARY, size)
            matched = (rows + head * GROUP) % size
            k[head, rows, before + matched] = signs[matched] * _RMS
            q[queries, rows, current + matched] = signs[matched] * _RMS * _MATCH_SCORE * math.sqrt(size) / len(matched)
            target, share = answer, _LAYER_SHARE / shape.heads
        elements = torch.arange(size)
        v[head, elements, current + order] = signs * _RMS
        for query in range(queries.start, queries.stop):
            o[target + order, query, elements] = signs * share
    return {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1), "o": o.flatten(1)}
