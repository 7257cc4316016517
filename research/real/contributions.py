"""Compares two orders of the tokens of a context: by attention weight, and by weight times the norm of the value."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from research.real.model import Llama, causal_attention, newest_weights
from research.real.rules import mask_of_best
from research.real.texts import Prompt

NEWEST = 128
"""Number of newest tokens whose queries are observed."""
COUNTS = (64, 256, 1024)
"""Numbers of best tokens."""


class ContributionObserver:
    """Dense attention that compares the orders in each layer (ART, Fig. 1)."""

    def __init__(self, model: Llama) -> None:
        """Observe a forward pass of the model."""
        self.rows: list[dict[str, Any]] = []
        """By layer and number of tokens; means over query heads and observed queries."""
        self._scale = model.scale

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `model.Attend`."""
        weights, _ = newest_weights(query[0], key[0], self._scale, NEWEST)
        values = value[0].float()
        written = weights * values.norm(dim=-1)[:, None, None]
        for count in COUNTS:
            if count < query.shape[2]:
                self.rows.append({"layer": layer, "tokens": count} | compare(weights, written, values, count))
        return causal_attention(query, key, value, self._scale)


def compare(weights: torch.Tensor, written: torch.Tensor, values: torch.Tensor, count: int) -> dict[str, float]:
    """Compare the best tokens by weight with the best by contribution.

    Args:
        weights: `[num_kv_heads, group_size, rows, num_tokens]` float32, attention.
        written: the contribution ||A_ij V_j||, of the same shape.
        values: `[num_kv_heads, num_tokens, head_size]` float32.
        count: best tokens of each order.

    Returns:
        `missed`, the share of the best by contribution that is not among the best by weight; `missed_output`, the
        contribution of these over that of all tokens; `weight_error` and `contribution_error`, the distance between the
        output of the best by each order and the output of all, over the norm of the latter.
    """
    by_weight, by_contribution = (mask_of_best(order, count) for order in (weights, written))
    missed = by_contribution & ~by_weight
    whole = weights @ values[:, None]
    found = {
        "missed": missed.float().sum(dim=-1).mean() / count,
        "missed_output": ((written * missed).sum(dim=-1) / written.sum(dim=-1)).mean(),
    }
    for name, chosen in ("weight_error", by_weight), ("contribution_error", by_contribution):
        kept = weights * chosen
        output = (kept / kept.sum(dim=-1, keepdim=True)) @ values[:, None]
        found[name] = ((output - whole).norm(dim=-1) / whole.norm(dim=-1)).mean()
    return {name: round(number.item(), 5) for name, number in found.items()}


def measure_contributions(model: Llama, texts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
    """Yield a row for each text, layer and number of tokens."""
    for text in texts:
        about = {"study": "contributions", "text": text.name, "kind": text.kind, "context_tokens": text.context_tokens}
        begin, observer = time.monotonic(), ContributionObserver(model)
        model.hidden_of(text.tokens, observer.attend)
        seconds = round(time.monotonic() - begin, 1)
        for row in observer.rows:
            yield about | {"arm": "layer"} | row | {"seconds": seconds}
