"""Decodes after a dense prefill, reading only selected pages, and counts the next tokens that change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from research.real.model import Cache, Llama, masked_attention, read
from research.real.pages import KINDS_OF_PAGES, ORACLE, PAGE, Layer, over_group, seen
from research.real.prefill import NOISE, SCORED
from research.real.texts import Prompt


def chosen_pages(layer: Layer, arm: str, reduce: str, budget: int) -> torch.Tensor:
    """Return the complete pages that each query reads: `[rows, num_kv_heads, num_pages]` bool.

    Args:
        layer: attention inputs of the queries.
        arm: a name in `KINDS_OF_PAGES`, or `ORACLE`.
        reduce: how to combine the scores of a group.
        budget: pages, including the first and the newest complete page.
    """
    if arm == ORACLE:
        scores = layer.mass
    else:
        scores = over_group(seen(layer, KINDS_OF_PAGES[arm].make(layer.keys)(layer.query)), reduce)
    pages = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, layer.best(scores, budget), True)
    return pages & (torch.arange(scores.shape[-1], device=scores.device) < layer.complete[:, None, None])


def tokens_of(pages: torch.Tensor, layer: Layer, num_tokens: int) -> torch.Tensor:
    """Return the tokens that each query reads: `[num_kv_heads, rows, num_tokens]` bool.

    Args:
        pages: see `chosen_pages`. The incomplete page is read in addition.
        layer: attention inputs of the queries.
        num_tokens: tokens of the cache, including the queries' tokens.
    """
    rows, heads, count = pages.shape
    tokens = torch.zeros(rows, heads, num_tokens, dtype=torch.bool, device=pages.device)
    tokens[..., : count * PAGE] = pages.repeat_interleave(PAGE, dim=-1)
    position = torch.arange(num_tokens, device=pages.device)
    row = torch.arange(num_tokens - rows, num_tokens, device=pages.device)[:, None]
    newest = (position >= layer.complete[:, None] * PAGE) & (position <= row)
    return (tokens | newest[:, None]).transpose(0, 1)


def predict(
    model: Llama, tokens: torch.Tensor, prompt: Cache, choose: Callable[[int, Layer], torch.Tensor]
) -> torch.Tensor:
    """Return the likeliest next token after each token that follows a prompt.

    Args:
        model: the model.
        tokens: `[tokens]` ids.
        prompt: has room for the tokens. Its length is restored.
        choose: takes the index of a layer and its inputs, and returns pages as `chosen_pages` does.
    """

    def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = prompt.put(index, key, value)
        layer = Layer.of(query[0], keys, model.scale)
        mask = tokens_of(choose(index, layer), layer, keys.shape[1])
        mask = mask.repeat_interleave(query.shape[1] // len(keys), dim=0)
        return masked_attention(query, keys[None], values[None], model.scale, mask[None])

    positions = torch.arange(prompt.length, prompt.length + len(tokens), device=model.device)
    return model.logits(model.hidden(tokens[None], positions, attend)[0]).argmax(dim=-1)


class Decoded:
    """The newest `SCORED` tokens of a text, behind a dense prefill of the others."""

    def __init__(self, model: Llama, text: Prompt) -> None:
        tokens = torch.tensor(text.tokens, device=model.device)
        self.model, self.before, self.after = model, tokens[:-SCORED], tokens[-SCORED:]
        self.cache = self._prefill(model)
        self.truth = self._dense(model, self.cache)

    def noise(self, exact: Llama) -> float:
        """Return the share of next tokens that dense attention keeps in another precision."""
        return _equal(self.truth, self._dense(exact, self._prefill(exact)))

    def agreement(self, choose: Callable[[int, Layer], torch.Tensor]) -> float:
        """Return the share of next tokens equal to those of dense attention. `choose`: see `predict`."""
        return _equal(self.truth, predict(self.model, self.after, self.cache, choose))

    def _prefill(self, model: Llama) -> Cache:
        cache = Cache(model, len(self.before) + len(self.after))
        read(model, self.before, cache)
        return cache

    def _dense(self, model: Llama, cache: Cache) -> torch.Tensor:
        length = cache.length
        found = model.logits(read(model, self.after, cache)).argmax(dim=-1)
        cache.length = length
        return found


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
        budgets: pages, see `chosen_pages`.
        first_dense: numbers of first layers that read everything.
    """
    for text in texts:
        begin = time.monotonic()
        decoded = Decoded(model, text)
        about = {"study": "decode", "text": text.name, "kind": text.kind, "context_tokens": text.context_tokens}
        if exact is not None:
            yield about | {"arm": NOISE, "agreement": decoded.noise(exact)}
        for arm in arms:
            for reduce in reduces[:1] if arm == ORACLE else reduces:
                for budget in budgets:
                    for layers in first_dense:

                        def choose(
                            index: int, layer: Layer, arm: str = arm, reduce: str = reduce, budget: int = budget,
                            layers: int = layers,
                        ) -> torch.Tensor:  # fmt: skip
                            pages = layer.keys.shape[1] if index < layers else budget
                            return chosen_pages(layer, arm, reduce, pages)

                        yield about | {
                            "arm": arm, "reduce": reduce, "pages": budget, "first_dense": layers,
                            "agreement": decoded.agreement(choose),
                        }  # fmt: skip
        yield {"study": "decode", "text": text.name, "arm": "", "seconds": round(time.monotonic() - begin, 3)}


def _equal(a: torch.Tensor, b: torch.Tensor) -> float:
    return round((a == b).float().mean().item(), 5)
