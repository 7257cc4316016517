"""Reads a prompt densely and collects the votes of every source."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from research.real.model import Cache, Llama, causal_attention, causal_weights, read
from research.real.rules import SINKS, Rule, Source
from research.real.texts import Prompt

LONGEST_WINDOW = 192
"""Number of newest queries of a prompt that are kept."""
_ROWS = 512
_LATER = 512
"""Positions after the prompt over which the rotation of an expected query is averaged."""
_EPSILON = 0.02
"""Added to expected attention before it is multiplied by the values' norms, as in kvpress."""


@dataclass
class Read:
    """A prompt after the prefill."""

    prompt: Prompt
    cache: Cache
    queries: torch.Tensor
    """`[layers, num_query_heads, newest, head_size]`, of the newest tokens, with positions."""
    first: int
    """The first token of the dense answer."""
    votes: dict[Source, torch.Tensor] = field(default_factory=dict)
    """`[layers, num_kv_heads, group_size, num_tokens]` float32 by source, without the window."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.tokens)

    @property
    def keys(self) -> torch.Tensor:
        """`[layers, num_kv_heads, num_tokens, head_size]`."""
        return self.cache.keys[:, :, : self.num_tokens]

    @property
    def values(self) -> torch.Tensor:
        """In the shape of `keys`."""
        return self.cache.values[:, :, : self.num_tokens]

    def votes_for(self, rule: Rule, scale: float) -> torch.Tensor:
        """Return the votes for a rule: `[layers, num_kv_heads, group_size, num_tokens]` float32."""
        if rule.source == "newest":
            return self.keys.new_zeros(*self.keys.shape[:2], 1, self.num_tokens, dtype=torch.float32)
        if rule.source != "window":
            return self.votes[rule.source]
        end = self.queries.shape[2] - (self.prompt.tail_tokens if rule.skip_tail else 0)
        query = self.queries[:, :, max(end - rule.window, 0) : end]
        last = self.num_tokens - (self.queries.shape[2] - end)
        rows = torch.arange(last - query.shape[2], last, device=query.device)
        layers = (causal_weights(query[layer], self.keys[layer], scale, rows) for layer in range(len(self.keys)))
        return torch.stack([reduced(weights, rule) for weights in layers])


def reduced(weights: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Combine the votes of queries: `[..., rows, num_tokens]` to `[..., num_tokens]`."""
    return weights.sum(dim=-2) if rule.queries == "sum" else weights.amax(dim=-2)


def read_prompt(model: Llama, prompt: Prompt, sources: Collection[Source]) -> Read:
    """Read a prompt and collect the votes of some sources, except `answer` and `repeat`."""
    tokens = torch.tensor(prompt.tokens, device=model.device)
    cache = Cache(model, len(tokens))
    newest = min(LONGEST_WINDOW, len(tokens))
    queries = torch.empty(
        model.num_layers, model.num_heads, newest, model.head_size, dtype=model.dtype, device=model.device
    )
    votes: dict[Source, list[torch.Tensor]] = {"h2o": [], "expected": []}

    def watch(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        queries[layer] = query[0, :, -newest:]
        if "h2o" in sources:
            votes["h2o"].append(attention_of_all(query[0], keys[0], model.scale))
        if "expected" in sources:
            votes["expected"].append(expected_attention(model, query[0], keys[0]))
        return query

    hidden = read(model, tokens, cache, watch)
    first = int(model.logits(hidden[-1]).argmax())
    return Read(prompt, cache, queries, first, {source: torch.stack(parts) for source, parts in votes.items() if parts})


def attention_of_all(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the attention on each token, summed over all queries: `[num_kv_heads, group_size, num_tokens]`."""
    sums = torch.zeros(())
    for start in range(0, query.shape[1], _ROWS):
        part = query[:, start : start + _ROWS]
        rows = torch.arange(start, start + part.shape[1], device=query.device)
        sums = sums.to(query.device) + causal_weights(part, keys, scale, rows).sum(dim=-2)
    return sums


def expected_attention(model: Llama, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the expected attention of queries after the prompt, assuming a normal distribution (kvpress).

    Mean and covariance are those of the prompt's queries before rotation. The rotation is averaged over the later
    positions.

    Args:
        model: the model.
        query: `[num_query_heads, num_tokens, head_size]` with positions.
        keys: `[num_kv_heads, num_tokens, head_size]` with positions.

    Returns:
        `[num_kv_heads, group_size, num_tokens]` float32.
    """
    num_tokens = query.shape[1]
    position = torch.arange(num_tokens, device=query.device)
    plain = model.rotate(query.float()[None], -position)[0, :, SINKS:]
    mean = plain.mean(dim=1, keepdim=True)
    centred = plain - mean
    covariance = centred.transpose(1, 2) @ centred / plain.shape[1]
    later = torch.arange(num_tokens, num_tokens + _LATER, device=query.device)
    unit = torch.eye(model.head_size, device=query.device)
    # Row i of the rotation is the rotated i-th unit vector.
    rotation = model.rotate(unit[None, :, None].expand(1, -1, _LATER, -1), later)[0].mean(dim=1)
    mean, covariance = mean @ rotation, rotation.T @ covariance @ rotation
    grouped = keys.float().repeat_interleave(len(query) // len(keys), dim=0)
    logits = (grouped @ mean.transpose(1, 2))[..., 0] * model.scale
    logits = logits + ((grouped @ covariance) * grouped).sum(dim=-1) * model.scale**2 / 2
    weights: torch.Tensor = (logits.softmax(dim=-1) + _EPSILON / num_tokens).unflatten(0, (len(keys), -1))
    return weights


def watch_answer(model: Llama, prompt: Read, answer: Sequence[int]) -> None:
    """Collect the votes of the dense answer's queries. A server does not have them when it must choose."""
    votes: list[torch.Tensor] = []
    if not answer:
        prompt.votes["answer"] = prompt.keys.new_zeros(
            *prompt.keys.shape[:2], model.num_heads // model.num_kv_heads, prompt.num_tokens, dtype=torch.float32
        )
        return
    tokens = torch.tensor(answer, device=model.device)
    _extend(model, prompt, tokens, lambda weights: votes.append(weights[..., : prompt.num_tokens].sum(dim=-2)))
    prompt.votes["answer"] = torch.stack(votes)


def read_again(model: Llama, prompt: Read, instruction: Sequence[int], chunk: int = 1024) -> None:
    """Collect the largest attention on each token in a second reading of the prompt (KVzip, arXiv 2505.23416).

    Args:
        model: the model.
        prompt: read again, in chunks after the prompt.
        instruction: tokens that ask for a repetition, before each chunk.
        chunk: tokens of the prompt in a chunk.
    """
    most: list[torch.Tensor] = []
    for start in range(0, prompt.num_tokens, chunk):
        layers: list[torch.Tensor] = []
        tokens = torch.tensor([*instruction, *prompt.prompt.tokens[start : start + chunk]], device=model.device)
        _extend(model, prompt, tokens, lambda weights, to=layers: to.append(_largest(weights, prompt.num_tokens)))
        most = [torch.maximum(a, b) for a, b in zip(most, layers, strict=True)] if most else layers
    prompt.votes["repeat"] = torch.stack(most)


def _largest(weights: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return weights[..., :num_tokens].amax(dim=-2)


def _extend(model: Llama, prompt: Read, tokens: torch.Tensor, watch: object) -> None:
    """Read tokens after a prompt without changing its cache. `watch` receives the weights of each layer."""
    assert callable(watch)
    rows = torch.arange(prompt.num_tokens, prompt.num_tokens + len(tokens), device=model.device)

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys = torch.cat([prompt.keys[layer], key[0]], dim=1)
        values = torch.cat([prompt.values[layer], value[0]], dim=1)
        watch(causal_weights(query[0], keys, model.scale, rows))
        return causal_attention(query, keys[None], values[None], model.scale)

    model.hidden(tokens[None], rows, attend)
