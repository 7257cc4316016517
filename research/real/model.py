"""A Llama or a Gemma 3 in plain torch. The caller supplies the attention function."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812

from vllm_sparse_plugin.errors import ConfigurationError

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes the layer, queries `[batch, num_query_heads, tokens, head_size]`, and keys and values `[batch, num_kv_heads,
tokens, head_size]` of the same tokens, with positions. Returns the output in the shape of the queries."""

_FULL = "full_attention"
"""Type of a layer without a window."""
_LOGIT_ROWS = 128
"""Tokens whose logits are computed at once."""


class Llama:
    """The weights, and the forward pass around the attention."""

    _type: ClassVar[str] = "llama"
    """`model_type` of the configuration."""
    _before_mlp: ClassVar[str] = "post_attention_layernorm"
    """Norm of the input of the MLP."""

    def __init__(self, config: Mapping[str, object], weights: Mapping[str, torch.Tensor], device: str) -> None:
        """Take a configuration and weights in transformers' format.

        Raises:
            ConfigurationError: the model is of another type, or has biases or positions that are not supported.
        """
        if config["model_type"] != self._type or config.get("attention_bias") or config.get("mlp_bias"):
            raise ConfigurationError(
                f"model: got {config['model_type']!r}, allowed: a Llama or a Gemma 3 of text without biases"
            )
        self.num_layers, self.num_heads = _integer(config, "num_hidden_layers"), _integer(config, "num_attention_heads")
        self.num_kv_heads = _integer(config, "num_key_value_heads")
        self.head_size = int(str(config.get("head_dim") or _integer(config, "hidden_size") // self.num_heads))
        self.scale: float = self.head_size**-0.5
        self.windows: list[int | None] = [None] * self.num_layers
        """Newest tokens that each layer reads; None: all."""
        self.device = torch.device(device)
        self._epsilon = float(str(config["rms_norm_eps"]))
        self._rotations = [self._rotation(config, config.get("rope_parameters") or config)] * self.num_layers
        self._weights = {name.removeprefix("model."): weight.to(device) for name, weight in weights.items()}
        self._weights.setdefault("lm_head.weight", self._weights["embed_tokens.weight"])
        self.dtype = self._weights["norm.weight"].dtype

    @staticmethod
    def load(folder: Path, device: str, dtype: torch.dtype) -> Llama:
        """Load a folder with `config.json` and `model.safetensors`."""
        from safetensors.torch import load_file

        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            weights = load_file(folder / "model.safetensors")
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"model: got {folder} ({error}), allowed: a folder of transformers") from None
        made = Gemma3 if config["model_type"] == Gemma3._type else Llama
        return made(config, {name: weight.to(dtype) for name, weight in weights.items()}, device)

    def _rotation(self, config: Mapping[str, object], parameters: object) -> tuple[torch.Tensor, float]:
        """Return the frequencies of a layer's positions `[head_size / 2]`, and a factor of the rotated rows."""
        assert isinstance(parameters, Mapping)
        kind = parameters.get("rope_type", "default")
        if kind == "yarn":
            from transformers import AutoConfig
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            others: dict[str, Any] = {name: value for name, value in config.items() if name != "model_type"}
            read = AutoConfig.for_model(str(config["model_type"]), **others)
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](read, self.device)
            return frequencies, factor
        if kind != "default" or config.get("rope_scaling"):
            raise ConfigurationError("model: got scaled positions, allowed: plain ones, or YaRN in rope_parameters")
        exponent = torch.arange(0, self.head_size, 2, dtype=torch.float32, device=self.device) / self.head_size
        return float(parameters["rope_theta"]) ** -exponent, 1.0

    def weight(self, layer: int, name: str) -> torch.Tensor:
        """Return a weight of a layer, such as `self_attn.o_proj`."""
        return self._weights[f"layers.{layer}.{name}.weight"]

    def rotate(self, rows: torch.Tensor, positions: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Rotate queries or keys to their positions. Negative positions undo it, unless the positions are scaled.

        Args:
            rows: `[batch, heads, tokens, head_size]`.
            positions: `[tokens]` or `[batch, tokens]` integer.
            layer: of the rows.
        """
        frequencies, factor = self._rotations[layer]
        angles = positions.to(torch.float32)[..., None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        if angles.dim() == 3:
            angles = angles[:, None]
        first, second = rows.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return rows * (angles.cos() * factor).to(rows.dtype) + turned * (angles.sin() * factor).to(rows.dtype)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend to a whole text as the model does, see `Attend`."""
        window = self.windows[layer]
        if window is None:
            return causal_attention(query, key, value, self.scale)
        return window_attention(query, key, value, self.scale, 0, window)

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        project: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run all layers. Return `[batch, tokens, hidden_size]` before the last norm.

        Args:
            tokens: `[batch, tokens]` ids.
            positions: `[tokens]` or `[batch, tokens]`.
            attend: the attention.
            project: replaces the output projection; takes the layer, the residual stream and the attention's output
                `[batch, tokens, num_query_heads * head_size]`.
        """
        x = self._embed(tokens)
        for layer in range(self.num_layers):
            h = self._norm(x, self.weight(layer, "input_layernorm"))
            query, key, value = (
                F.linear(h, self.weight(layer, f"self_attn.{name}_proj")).unflatten(-1, (-1, self.head_size))
                .transpose(1, 2)
                for name in "qkv"
            )  # fmt: skip
            query, key = self._normed(layer, "q_norm", query), self._normed(layer, "k_norm", key)
            query, key = (self.rotate(rows, positions, layer) for rows in (query, key))
            output = attend(layer, query, key, value).transpose(1, 2).flatten(2)
            if project is None:
                added = F.linear(output, self.weight(layer, "self_attn.o_proj"))
            else:
                added = project(layer, x, output)
            x = self._add(layer, x, added, "post_attention_layernorm")
            h = self._norm(x, self.weight(layer, self._before_mlp))
            h = self._activate(F.linear(h, self.weight(layer, "mlp.gate_proj"))) * F.linear(
                h, self.weight(layer, "mlp.up_proj")
            )
            x = self._add(layer, x, F.linear(h, self.weight(layer, "mlp.down_proj")), "post_feedforward_layernorm")
        return x

    def hidden_of(
        self,
        text: Sequence[int],
        attend: Attend,
        project: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Read a text. Return `[tokens, hidden_size]`, see `hidden`."""
        ids = torch.tensor(text, device=self.device)
        return self.hidden(ids[None], torch.arange(len(ids), device=self.device), attend, project)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits of hidden states."""
        return F.linear(self._norm(hidden, self._weights["norm.weight"]), self._weights["lm_head.weight"]).float()

    def nats(self, hidden: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the mean loss of hidden states `[tokens, hidden_size]` that predict `targets` `[tokens]`."""
        total = 0.0
        for some, expected in zip(hidden.split(_LOGIT_ROWS), targets.split(_LOGIT_ROWS), strict=True):
            total += F.cross_entropy(self.logits(some), expected, reduction="sum").item()
        return total / len(targets)

    @property
    def linear_parameters(self) -> int:
        """Return the number of parameters that multiply every token of a prompt."""
        return sum(weight.numel() for name, weight in self._weights.items() if "_proj" in name)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self._weights["embed_tokens.weight"])

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)

    def _normed(self, layer: int, name: str, heads: torch.Tensor) -> torch.Tensor:
        """Return queries or keys before their rotation."""
        return heads

    def _add(self, layer: int, x: torch.Tensor, added: torch.Tensor, name: str) -> torch.Tensor:
        """Add the output of an attention or an MLP to the residual stream. `name` is the norm of a Gemma's output."""
        return x + added

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self._epsilon)
        return weight * wide.to(x.dtype)


class Gemma3(Llama):
    """A Gemma 3 of text: norms of queries, keys and outputs, and windows in most layers."""

    _type = "gemma3_text"
    _before_mlp = "pre_feedforward_layernorm"

    def __init__(self, config: Mapping[str, object], weights: Mapping[str, torch.Tensor], device: str) -> None:
        """See `Llama`."""
        if config.get("use_bidirectional_attention") or config.get("attn_logit_softcapping"):
            raise ConfigurationError("model: got a Gemma 3 of another attention, allowed: causal softmax attention")
        kinds, parameters = config["layer_types"], config["rope_parameters"]
        assert isinstance(kinds, list)
        assert isinstance(parameters, Mapping)
        super().__init__(dict(config) | {"rope_parameters": parameters[_FULL]}, weights, device)
        rotations = {kind: self._rotation(config, parameters[kind]) for kind in set(kinds)}
        self._rotations = [rotations[kind] for kind in kinds]
        self.windows = [None if kind == _FULL else _integer(config, "sliding_window") for kind in kinds]
        self.scale = float(str(config["query_pre_attn_scalar"])) ** -0.5
        self._embedding_scale = _integer(config, "hidden_size") ** 0.5

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        x = super()._embed(tokens)
        return x * torch.tensor(self._embedding_scale, dtype=x.dtype, device=x.device)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")

    def _normed(self, layer: int, name: str, heads: torch.Tensor) -> torch.Tensor:
        return self._norm(heads, self.weight(layer, f"self_attn.{name}"))

    def _add(self, layer: int, x: torch.Tensor, added: torch.Tensor, name: str) -> torch.Tensor:
        return x + self._norm(added, self.weight(layer, name))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self._epsilon)
        return (wide * (1 + weight.float())).to(x.dtype)


def _integer(config: Mapping[str, object], name: str) -> int:
    return int(str(config[name]))


class Cache:
    """Keys and values of one sequence by layer, with room for more."""

    def __init__(self, model: Llama, room: int) -> None:
        shape = model.num_layers, model.num_kv_heads, room, model.head_size
        self.keys, self.values = (torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        self.length = 0

    def put(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a batch of one. Return all keys and values of the layer."""
        end = self.length + key.shape[2]
        self.keys[layer, :, self.length : end], self.values[layer, :, self.length : end] = key[0], value[0]
        return self.keys[layer, :, :end], self.values[layer, :, :end]


def causal_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend causally. Queries are the newest tokens: `[batch, heads, tokens, head_size]` each."""
    tokens, total = query.shape[2], keys.shape[2]
    if tokens == total:
        return masked_attention(query, keys, values, scale, None)
    mask = torch.ones(tokens, total, dtype=torch.bool, device=query.device).tril(total - tokens)
    return masked_attention(query, keys, values, scale, mask)


def masked_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend by a mask `[tokens, num_tokens]`, or causally without one. No row of the mask may be empty."""
    # The kernel with masks does not support GQA groups.
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    return F.scaled_dot_product_attention(query, keys, values, mask, is_causal=mask is None, scale=scale)


def window_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, sinks: int, newest: int
) -> torch.Tensor:
    """Attend causally to the first `sinks` and the `newest` tokens, with their positions in the text."""
    tokens, outputs = query.shape[2], []
    for begin in range(0, tokens, newest):
        end, first = min(begin + newest, tokens), max(begin - newest + 1, 0)
        some = torch.cat([torch.arange(min(sinks, first)), torch.arange(first, end)]).to(query.device)
        rows = torch.arange(begin, end, device=query.device)[:, None]
        mask = (some <= rows) & ((some > rows - newest) | (some < sinks))
        outputs.append(masked_attention(query[:, :, begin:end], key[:, :, some], value[:, :, some], scale, mask))
    return torch.cat(outputs, dim=2)


def causal_weights(query: torch.Tensor, keys: torch.Tensor, scale: float, rows: torch.Tensor) -> torch.Tensor:
    """Return causal attention weights: `[..., num_kv_heads, group_size, rows, num_tokens]` float32.

    Args:
        query: `[..., num_query_heads, rows, head_size]`.
        keys: `[..., num_kv_heads, num_tokens, head_size]`.
        scale: factor of the logits.
        rows: `[rows]`, positions of the queries.
    """
    grouped = query.unflatten(-3, (keys.shape[-3], -1))
    logits = (grouped @ keys.unsqueeze(-3).transpose(-1, -2)).float() * scale
    hidden = torch.arange(keys.shape[-2], device=keys.device) > rows[:, None]
    weights: torch.Tensor = logits.masked_fill_(hidden, -torch.inf).softmax(dim=-1)
    return weights


def newest_weights(
    query: torch.Tensor, keys: torch.Tensor, scale: float, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the causal weights of the newest queries of a text, see `causal_weights`, and their positions.

    Args:
        query: `[num_query_heads, num_tokens, head_size]`.
        keys: `[num_kv_heads, num_tokens, head_size]`.
        scale: factor of the logits.
        count: number of queries; all of a shorter text.
    """
    first = max(query.shape[-2] - count, 0)
    rows = torch.arange(first, query.shape[-2], device=query.device)
    return causal_weights(query[:, first:], keys, scale, rows), rows


def read(model: Llama, tokens: torch.Tensor, cache: Cache, watch: Attend | None = None) -> torch.Tensor:
    """Append tokens to a cache, densely. Return their hidden states `[tokens, hidden_size]`.

    Args:
        model: the model.
        tokens: `[tokens]` ids.
        cache: grows by the tokens.
        watch: receives queries, and all keys and values, of each layer. Its result is ignored.
    """

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = (part[None] for part in cache.put(layer, key, value))
        if watch is not None:
            watch(layer, query, keys, values)
        return causal_attention(query, keys, values, model.scale)

    positions = torch.arange(cache.length, cache.length + len(tokens), device=model.device)
    hidden = model.hidden(tokens[None], positions, attend)
    cache.length += len(tokens)
    return hidden[0]
