"""Decodes after a dense prefill, reading only selected pages, and counts the next tokens that change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from research.real.model import Cache, Llama, masked_attention, read
from research.real.pages import KINDS_OF_PAGES, ORACLE, PAGE, Layer, over_group, seen
from research.real.prefill import NOISE, SCORED
from research.real.texts import Prompt


def chosen_tokens(layer: Layer, arm: str, reduce: str, budget: int, num_tokens: int) -> torch.Tensor:
    """Return the tokens that each query reads: `[num_kv_heads, rows, num_tokens]` bool.

    Args:
        layer: attention inputs of the queries.
        arm: a name in `KINDS_OF_PAGES`, or `ORACLE`.
        reduce: how to combine the scores of a group.
        budget: pages, including the first and the newest complete page. The incomplete page is read in addition.
        num_tokens: tokens of the cache, including the queries' tokens.
    """
    if arm == ORACLE:
        scores = layer.mass
    else:
        scores = over_group(seen(layer, KINDS_OF_PAGES[arm].make(layer.keys)(layer.query)), reduce)
    pages = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, layer.best(scores, budget), True)
    rows, heads, count = scores.shape
    page = torch.arange(count, device=scores.device)
    pages &= page < layer.complete[:, None, None]
    tokens = torch.zeros(rows, heads, num_tokens, dtype=torch.bool, device=scores.device)
    tokens[..., : count * PAGE] = pages.repeat_interleave(PAGE, dim=-1)
    position = torch.arange(num_tokens, device=scores.device)
    row = torch.arange(num_tokens - rows, num_tokens, device=scores.device)[:, None]
    newest = (position >= layer.complete[:, None] * PAGE) & (position <= row)
    return (tokens | newest[:, None]).transpose(0, 1)


def predict(
    model: Llama, tokens: torch.Tensor, prompt: Cache, arm: str, reduce: str, budget: int, first_dense: int
) -> torch.Tensor:
    """Return the likeliest next token after each token that follows a prompt. Each token selects its own pages.

    Args:
        model: the model.
        tokens: `[tokens]` ids.
        prompt: has room for the tokens. Its length is restored.
        arm: see `chosen_tokens`.
        reduce: see `chosen_tokens`.
        budget: see `chosen_tokens`.
        first_dense: number of first layers that read everything.
    """

    def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = prompt.put(index, key, value)
        pages = keys.shape[1] // PAGE if index < first_dense else budget
        layer = Layer.of(query[0], keys, model.scale)
        mask = chosen_tokens(layer, arm, reduce, pages, keys.shape[1])
        mask = mask.repeat_interleave(query.shape[1] // len(keys), dim=0)
        return masked_attention(query, keys[None], values[None], model.scale, mask[None])

    positions = torch.arange(prompt.length, prompt.length + len(tokens), device=model.device)
    return model.logits(model.hidden(tokens[None], positions, attend)[0]).argmax(dim=-1)


def measure_decode(
    model: Llama,
    exact: Llama | None,
    texts: Sequence[Prompt],
    arms: Sequence[str],
    reduces: Sequence[str],
    budgets: Sequence[int],
    first_dense: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm, budget and text: the share of next tokens equal to those of dense attention.

    Args:
        model: the model.
        exact: the model in float32, for the noise of dense attention; None to omit the noise.
        texts: texts to read; the newest `SCORED` tokens are decoded.
        arms: names in `KINDS_OF_PAGES`, or `ORACLE`.
        reduces: `max`, `share`, or both.
        budgets: pages, see `chosen_tokens`.
        first_dense: numbers of first layers that read everything.
    """
    for text in texts:
        begin = time.monotonic()
        tokens = torch.tensor(text.tokens, device=model.device)
        before, after = tokens[:-SCORED], tokens[-SCORED:]
        about = {"study": "decode", "text": text.name, "kind": text.kind, "context_tokens": text.context_tokens}

        def prefill(by: Llama, before: torch.Tensor = before, room: int = len(tokens)) -> Cache:
            cache = Cache(by, room)
            read(by, before, cache)
            return cache

        cache = prefill(model)
        length = cache.length

        def dense(by: Llama, cache: Cache, after: torch.Tensor = after, length: int = length) -> torch.Tensor:
            found = by.logits(read(by, after, cache)).argmax(dim=-1)
            cache.length = length
            return found

        truth = dense(model, cache)
        if exact is not None:
            yield about | {"arm": NOISE, "agreement": _equal(truth, dense(exact, prefill(exact)))}
        for arm in arms:
            for reduce in reduces[:1] if arm == ORACLE else reduces:
                for budget in budgets:
                    for layers in first_dense:
                        found = predict(model, after, cache, arm, reduce, budget, layers)
                        yield about | {
                            "arm": arm, "reduce": reduce, "pages": budget, "first_dense": layers,
                            "agreement": _equal(truth, found),
                        }  # fmt: skip
        yield {"study": "decode", "text": text.name, "arm": "", "seconds": round(time.monotonic() - begin, 3)}


def _equal(a: torch.Tensor, b: torch.Tensor) -> float:
    return round((a == b).float().mean().item(), 5)
