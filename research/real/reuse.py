"""Decodes with pages that another layer chose, and counts the next tokens that change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from research.real.decode import Decoded, chosen_pages
from research.real.model import Llama
from research.real.pages import Layer
from research.real.prefill import NOISE
from research.real.texts import Prompt
from vllm_sparse_plugin.tools.diagnostics.anchors import place_anchors

STRIDES = 2, 3, 4
"""Every which layer chooses."""
SHARES = 2, 3, 4
"""Layers per anchor, if measured weights place the anchors."""


class Plan:
    """Which layer's pages each layer reads, and those of which KV head."""

    def __init__(self, name: str, anchors: Sequence[int], heads: torch.Tensor | None = None) -> None:
        """Take the anchor of each layer, and `[num_layers, num_layers, num_kv_heads]` heads, [layer, anchor, head]."""
        self.name, self.anchors, self.heads = name, list(anchors), heads

    @property
    def layers(self) -> list[int]:
        """The layers that choose."""
        return sorted(set(self.anchors))

    @property
    def num_anchors(self) -> int:
        """How many layers choose."""
        return len(self.layers)

    def choose(self, arm: str, budget: int) -> Any:
        """Return the choice of `predict`."""
        chosen: dict[int, torch.Tensor] = {}

        def choose(index: int, layer: Layer) -> torch.Tensor:
            anchor = self.anchors[index]
            if anchor == index:
                chosen[index] = chosen_pages(layer, arm, "max", budget)
                return chosen[index]
            pages = chosen[anchor]
            return pages if self.heads is None else pages[:, self.heads[index, anchor]]

        return choose


def caught_weight(model: Llama, texts: Sequence[Prompt], arm: str, budget: int) -> torch.Tensor:
    """Return the weight of a layer's head in pages of an anchor's head: `[layer, anchor, head, anchor's head]`.

    A layer's weight in the pages that its head chose itself lies on the diagonals. Mean over texts and rows.
    """
    layers = model.num_layers
    total = None
    for text in texts:
        pages: list[torch.Tensor] = []

        def choose(index: int, layer: Layer, pages: list[torch.Tensor] = pages) -> torch.Tensor:
            nonlocal total
            pages.append(chosen_pages(layer, arm, "max", budget))
            heads = layer.mass.shape[1]
            if total is None:
                total = torch.zeros(layers, layers, heads, heads, device=layer.mass.device)
            for anchor, chosen in enumerate(pages):
                total[index, anchor] += torch.einsum("rhp,rap->ha", layer.mass, chosen.float()) / len(layer.mass)
            return pages[-1]

        Decoded(model, text).agreement(choose)
    assert total is not None
    return total / len(texts)


def plans_of(caught: torch.Tensor) -> list[Plan]:
    """Return the plans to compare, from `caught_weight`."""
    layers = len(caught)
    mapped, heads = caught.max(dim=-1)
    same = caught.diagonal(dim1=-2, dim2=-1)
    alone = same.mean(dim=-1).diagonal()
    loss, loss_by_heads = (alone[:, None] - found.mean(dim=-1) for found in (same, mapped))
    loss_by_heads.fill_diagonal_(0)
    plans = [Plan("each", range(layers))]
    for stride in STRIDES:
        anchors = [index - index % stride for index in range(layers)]
        plans += [Plan(f"every{stride}", anchors), Plan(f"every{stride}_heads", anchors, heads)]
    for share in SHARES:
        plans.append(Plan(f"placed{share}", place_anchors(loss, -(-layers // share))))
        plans.append(Plan(f"placed{share}_heads", place_anchors(loss_by_heads, -(-layers // share)), heads))
    return plans


def measure_reuse(
    model: Llama,
    exact: Llama | None,
    held_out: Sequence[Prompt],
    texts: Sequence[Prompt],
    arms: Sequence[str],
    budgets: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm, budget, plan and text: the share of next tokens equal to those of dense attention.

    Args:
        model: the model.
        exact: the model in float32, for the noise of dense attention; None to omit the noise.
        held_out: texts that place anchors and pair heads.
        texts: texts to read.
        arms: names in `KINDS_OF_PAGES`.
        budgets: pages, see `chosen_pages`.
    """
    plans = {(arm, budget): plans_of(caught_weight(model, held_out, arm, budget)) for arm in arms for budget in budgets}
    for text in texts:
        begin = time.monotonic()
        decoded = Decoded(model, text)
        about = {"study": "reuse", "text": text.name, "kind": text.kind, "context_tokens": text.context_tokens}
        if exact is not None:
            yield about | {"arm": NOISE, "agreement": decoded.noise(exact)}
        for (arm, budget), compared in plans.items():
            for plan in compared:
                yield about | {
                    "arm": arm, "pages": budget, "plan": plan.name, "anchors": plan.num_anchors, "layers": plan.layers,
                    "agreement": decoded.agreement(plan.choose(arm, budget)),
                }  # fmt: skip
        yield {"study": "reuse", "text": text.name, "arm": "", "seconds": round(time.monotonic() - begin, 3)}
