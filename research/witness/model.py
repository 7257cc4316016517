"""The witness: a small Llama of transformers, with a forward pass of its own that compiles quickly."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from bench.common.models import NEEDLE_8M, TOKENIZER_FILES
from research.witness.data import SOURCES

HEAD_SIZE = 64
ROPE_THETA = 1e6
MAX_POSITIONS = 16384
FIRST_PRICED = 2
"""Layer from which on speech has a price: SinkRouter never skips in those before."""
_PADDING = 8  # flash kernels take heads of multiples of it


def build_model(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, seed: int) -> Any:
    """A `LlamaForCausalLM` in float32 with drawn weights and needle-8m's vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    vocabulary = json.loads((NEEDLE_8M / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            **{name: vocabulary[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
            num_hidden_layers=layers,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=HEAD_SIZE,
            max_position_embeddings=MAX_POSITIONS,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
        )
    ).float()
    with torch.no_grad():
        for layer in model.model.layers:
            # What 2 x layers outputs add up to is as large as one of them.
            layer.self_attn.o_proj.weight.mul_((2 * layers) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * layers) ** -0.5)
    return model


def save_model(model: Any, folder: Path) -> None:
    """Write weights in bfloat16, configuration and tokenizer; an interrupted save leaves the last one whole."""
    half = copy.deepcopy(model).to("cpu", torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".save-") as part:
        half.save_pretrained(part)
        for name in TOKENIZER_FILES:
            shutil.copy(NEEDLE_8M / name, part)
        for path in Path(part).iterdir():
            path.chmod(0o644)
            path.replace(folder / path.name)


class Loss(NamedTuple):
    """What is to be made small."""

    sums: torch.Tensor
    """Cross entropy in nats by source, summed over tokens: `[len(SOURCES)]` float32."""
    speech: torch.Tensor
    """Share of the attention that is not on token 0: from layer `FIRST_PRICED` on, of all tokens but that one."""


class Forward:
    """The forward pass of a `LlamaForCausalLM` over whole sequences, layer by layer.

    Layers of one shape share what is compiled, so a new sequence length takes seconds.
    """

    def __init__(self, model: Any, compiled: bool) -> None:
        self._model = model
        self._layer: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _layer
        self._loss_sums: Callable[..., torch.Tensor] = _loss_sums
        self.compiled = compiled
        if compiled:
            import torch._dynamo

            # One for each length; past the limit torch would run uncompiled without saying so.
            torch._dynamo.config.recompile_limit = 64
            self._layer = torch.compile(_layer, dynamic=False)
            self._loss_sums = torch.compile(_loss_sums, dynamic=False)

    def run_eagerly(self) -> None:
        """Use nothing that is compiled any more."""
        self._layer, self._loss_sums, self.compiled = _layer, _loss_sums, False

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[num_sequences, length]` ids to `[num_sequences, length, vocab_size]`."""
        return _logits(self._hidden(tokens)[0], *self._head())

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor, kinds: torch.Tensor) -> Loss:
        """How well each token is predicted, and at what price.

        Args:
            tokens: `[num_sequences, length]` ids.
            targets: ids of the same shape that follow each.
            kinds: of the targets, an index into `SOURCES` each.
        """
        x, speeches = self._hidden(tokens)
        priced = speeches[FIRST_PRICED:]
        return Loss(
            self._loss_sums(x, *self._head(), targets, kinds),
            torch.stack(priced).mean() if priced else torch.zeros((), device=x.device),
        )

    def _hidden(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What the last layer puts out, `[num_sequences, length, hidden_size]`, and the speech of each."""
        x: torch.Tensor = self._model.model.embed_tokens(tokens)
        cos, sin = _rotations(tokens.shape[1], tokens.device)
        eps = self._model.config.rms_norm_eps
        speeches = []
        for layer in self._model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            x, spoken = self._layer(
                x, cos, sin, eps,
                layer.input_layernorm.weight, attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight,
                attention.o_proj.weight, layer.post_attention_layernorm.weight, mlp.gate_proj.weight,
                mlp.up_proj.weight, mlp.down_proj.weight,
            )  # fmt: skip
            speeches.append(spoken)
        return x, speeches

    def _head(self) -> tuple[float, torch.Tensor, torch.Tensor]:
        model = self._model.model
        return self._model.config.rms_norm_eps, model.norm.weight, model.embed_tokens.weight


@cache
def _rotations(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = ROPE_THETA ** -(torch.arange(0, HEAD_SIZE, 2, device=device, dtype=torch.float32) / HEAD_SIZE)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _layer(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, norm: torch.Tensor, q_proj: torch.Tensor,
    k_proj: torch.Tensor, v_proj: torch.Tensor, o_proj: torch.Tensor, mlp_norm: torch.Tensor, gate: torch.Tensor,
    up: torch.Tensor, down: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    h = _norm(x, norm, eps)
    q, k, v = (
        functional.linear(h, weight).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
        for weight in (q_proj, k_proj, v_proj)
    )
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    group = q.shape[1] // k.shape[1]
    attended, first = _attend(q, *(part.repeat_interleave(group, dim=1) for part in (k, v)))
    x = x + functional.linear(attended.transpose(1, 2).flatten(2), o_proj)
    h = _norm(x, mlp_norm, eps)
    x = x + functional.linear(functional.silu(functional.linear(h, gate)) * functional.linear(h, up), down)
    return x, 1 - first[..., 1:].float().mean()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention's outputs and its weights on token 0, `[num_sequences, num_heads, num_tokens]`."""
    # One more element of the values, 1 for token 0 and 0 for all others, becomes the weight on it.
    marks = functional.pad(v.new_ones(1, 1), (0, _PADDING - 1, 0, v.shape[2] - 1)).expand(*v.shape[:3], _PADDING)
    attended = functional.scaled_dot_product_attention(
        functional.pad(q, (0, _PADDING)),
        functional.pad(k, (0, _PADDING)),
        torch.cat([v, marks], dim=-1),
        is_causal=True,
        scale=HEAD_SIZE**-0.5,
    )
    return attended[..., :HEAD_SIZE], attended[..., HEAD_SIZE]


def _logits(x: torch.Tensor, eps: float, norm: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    return functional.linear(_norm(x, norm, eps), embedding)


def _loss_sums(
    x: torch.Tensor, eps: float, norm: torch.Tensor, embedding: torch.Tensor, targets: torch.Tensor, kinds: torch.Tensor
) -> torch.Tensor:
    logits = _logits(x, eps, norm, embedding).flatten(0, 1).float()
    losses = functional.cross_entropy(logits, targets.flatten(), reduction="none")
    return torch.stack([(losses * (kinds.flatten() == kind)).sum() for kind in range(len(SOURCES))])
