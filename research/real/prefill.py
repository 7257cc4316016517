"""Prefills with important tokens only (ZipVL, arXiv 2410.08584), in several forms, and then decodes densely."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from research.real.model import Cache, Llama, causal_weights, masked_attention, read
from research.real.texts import Prompt

SCORED = 128
"""Newest tokens of a text. They are decoded densely after the prefill."""
WITHIN = 96
"""Newest tokens of the prefill whose predictions are compared."""
PROBES = 64
"""Number of newest rows that vote, and of random rows."""


@dataclass(frozen=True)
class Form:
    """Selection of important tokens, and treatment of the others."""

    others: Literal["zero", "rows", "dense"] = "zero"
    """Output of an unimportant token: zero, attention to the important tokens, or dense attention (a bound that saves
    nothing there)."""
    tau: float = 0.975
    """Share of the attention weight of important tokens."""
    first_dense: int = 0
    """Number of first layers that are dense."""
    sinks: bool = False
    """Whether the first four tokens are always important."""
    local: int = 1
    """With `rows`: newest tokens that all rows also see, themselves included; 0 for none."""
    shortest: int = 0
    """Tokens with a shorter context attend densely."""
    ratio: float | None = None
    """Replaces `tau`: the share of the tokens that is important in every layer."""
    newest: int = PROBES
    """Newest rows that vote."""
    drawn: int = PROBES
    """Random rows that vote, beside them."""
    counted: Literal["sums", "means"] = "sums"
    """What `tau` is a share of: sums over the rows that see a token, or their means."""
    ranked: Literal["sums", "means"] = "means"
    """Which tokens are important: those with the largest sums or means."""


FORMS: dict[str, Form] = {
    "zipvl": Form(),
    "rows": Form("rows"),
    "rows_sinks": Form("rows", sinks=True),
    "rows_local64": Form("rows", sinks=True, local=64),
    "rows_local64_first2": Form("rows", sinks=True, local=64, first_dense=2),
    "rows_local64_99": Form("rows", 0.99, sinks=True, local=64),
    "rows_99": Form("rows", 0.99),
    "rows_999": Form("rows", 0.999),
    "rows_first2": Form("rows", first_dense=2),
    "rows_first4": Form("rows", first_dense=4),
    "zero_99": Form(tau=0.99),
    "zero_999": Form(tau=0.999),
    "zero_first4": Form(first_dense=4),
    "zero_999_first4_sinks": Form(tau=0.999, first_dense=4, sinks=True),
    "zero_shortest1024": Form(shortest=1024),
    "zero_shortest2048": Form(shortest=2048),
    "rows_shortest1024": Form("rows", shortest=1024),
    "rows_shortest2048": Form("rows", shortest=2048),
    "rows_local64_99_first2_1024": Form("rows", 0.99, 2, True, 64, 1024),
    "rows_local256": Form("rows", sinks=True, local=256),
    "rows_local64_95": Form("rows", 0.95, sinks=True, local=64),
    "rows_local64_90": Form("rows", 0.9, sinks=True, local=64),
    "rows_nolocal": Form("rows", sinks=True, local=0),
    "bound": Form("dense"),
}
"""By name of the arm, the most important first."""
NOISE = "noise"
"""Arm that compares dense attention in float32 and in bfloat16."""


def important_tokens(sums: torch.Tensor, seen_by: torch.Tensor, form: Form) -> torch.Tensor:
    """Choose the important tokens of a layer (ZipVL, Eq. 7 to 9).

    Args:
        sums: `[num_tokens]` float32, attention of the probe rows, summed over rows and heads.
        seen_by: `[num_tokens]`, number of probe rows that see each token.
        form: how many are important, by default as many as the most attended tokens that reach `tau`, and which.

    Returns:
        `[num_tokens]` bool: by default tokens with the most attention per row that sees them, and the last token.
    """
    scores = {"sums": sums, "means": sums / seen_by.clamp(min=1)}
    if form.ratio is None:
        covered = scores[form.counted].double().sort(descending=True).values.cumsum(dim=0)
        count = int((covered < covered[-1] * form.tau).sum()) + 1
    else:
        count = math.ceil(form.ratio * len(sums))
    mask = torch.zeros_like(sums, dtype=torch.bool)
    mask[scores[form.ranked].sort(descending=True, stable=True).indices[:count]] = True
    mask[-1] = True
    return mask


def allowed_pairs(important: torch.Tensor, form: Form) -> torch.Tensor:
    """Return the pairs of a layer that attend: `[num_tokens, num_tokens]` bool. Empty rows mean zero output."""
    position = torch.arange(len(important), device=important.device)
    row, column = position[:, None], position[None]
    causal = column <= row
    pairs = causal & important
    if form.others == "zero":
        pairs &= important[:, None]
    elif form.others == "rows":
        pairs |= causal & (row - column < form.local)
    else:
        pairs |= causal & ~important[:, None]
    return pairs | (causal & (row < form.shortest))


class Prefill:
    """Attention of one prompt in one form. Counts the computed work."""

    def __init__(self, model: Llama, form: Form, cache: Cache, num_tokens: int, seed: int) -> None:
        self.kept: list[float] = []
        """Share of important tokens, by layer."""
        self.pairs: list[float] = []
        """Pairs of query and key that attend, over those of dense attention, by layer."""
        self._model, self._form, self._cache = model, form, cache
        newest = min(form.newest, num_tokens)
        drawn = torch.randperm(num_tokens - newest, generator=torch.Generator().manual_seed(seed))[: form.drawn]
        self._rows = torch.cat([drawn, torch.arange(num_tokens - newest, num_tokens)]).sort().values.to(model.device)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `model.Attend`."""
        self._cache.put(layer, key, value)
        scale, form = self._model.scale, self._form
        if layer < form.first_dense:
            self.kept.append(1.0)
            self.pairs.append(1.0)
            return masked_attention(query, key, value, scale, None)
        weights = causal_weights(query[0, :, self._rows], key[0], scale, self._rows)
        position = torch.arange(key.shape[2], device=key.device)
        seen_by = (self._rows[:, None] >= position).sum(dim=0)
        important = important_tokens(weights.sum(dim=(0, 1, 2)), seen_by, form)
        if form.sinks:
            important[:4] = True
        pairs = allowed_pairs(important, form)
        empty = ~pairs.any(dim=-1)
        self.kept.append(important.float().mean().item())
        self.pairs.append(pairs.sum().item() / (len(important) * (len(important) + 1) / 2))
        pairs[empty, 0] = True
        return masked_attention(query, key, value, scale, pairs).masked_fill_(empty[:, None], 0.0)


def flops_share(model: Llama, num_tokens: int, form: Form, pairs: Sequence[float]) -> dict[str, float]:
    """Estimate the operations of a prefill over those of dense attention: for attention, and for the whole model.

    A multiplication and an addition are two operations. Probe rows are computed twice, once for the votes.
    """
    per_pair = 4 * model.num_heads * model.head_size
    dense = model.num_layers * per_pair * num_tokens * (num_tokens + 1) / 2
    probing = (model.num_layers - form.first_dense) * per_pair / 2 * (form.newest + form.drawn) * num_tokens
    sparse = dense * sum(pairs) / len(pairs) + probing
    linear = 2.0 * model.linear_parameters * num_tokens
    return {"attention_flops": round(sparse / dense, 4), "flops": round((sparse + linear) / (dense + linear), 4)}


def measure_prefill(
    model: Llama, exact: Llama | None, texts: Sequence[Prompt], arms: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm and text: the share of next tokens equal to those of dense attention.

    Args:
        model: the model.
        exact: the model in float32, for the noise of dense attention; None to omit the noise.
        texts: texts to read.
        arms: names in `FORMS`.
    """
    for number, text in enumerate(texts):
        tokens = torch.tensor(text.tokens, device=model.device)
        about = {"study": "prefill", "text": text.name, "kind": text.kind, "context_tokens": text.context_tokens}
        before = len(tokens) - SCORED
        dense = predictions(model, tokens, before, None)
        if exact is not None:
            begin = time.monotonic()
            other = predictions(exact, tokens, before, None)
            yield about | {"arm": NOISE} | _agreement(dense, other) | _seconds(begin)
        for arm in arms:
            begin = time.monotonic()
            form = FORMS[arm]
            cache = Cache(model, len(tokens))
            prefill = Prefill(model, form, cache, before, number)
            found = predictions(model, tokens, before, prefill, cache)
            columns = {"kept": round(sum(prefill.kept) / len(prefill.kept), 4)}
            yield (
                about | {"arm": arm} | _agreement(dense, found) | columns
                | flops_share(model, before, form, prefill.pairs) | _seconds(begin)
            )  # fmt: skip


def _seconds(begin: float) -> dict[str, float]:
    return {"seconds": round(time.monotonic() - begin, 3)}


def _agreement(dense: tuple[torch.Tensor, torch.Tensor], found: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    names = "within", "agreement"
    return {
        name: round((a == b.to(a.device)).float().mean().item(), 4)
        for name, a, b in zip(names, dense, found, strict=True)
    }


def predictions(
    model: Llama, tokens: torch.Tensor, before: int, prefill: Prefill | None, cache: Cache | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest next tokens of the newest prefill rows, and of the tokens decoded after them."""
    cache = cache or Cache(model, len(tokens))
    if prefill is None:
        hidden = read(model, tokens[:before], cache)
    else:
        hidden = model.hidden(tokens[None, :before], torch.arange(before, device=model.device), prefill.attend)[0]
        cache.length = before
    within = model.logits(hidden[-WITHIN:]).argmax(dim=-1)
    return within, model.logits(read(model, tokens[before:], cache)).argmax(dim=-1)
