"""Finds the layers of a model whose pages the layers behind them can read, and which KV head reads whose pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_sparse_plugin.config.anchors import anchors_of_layers
from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.policies import Selection
from vllm_sparse_plugin.tools.diagnostics.forward import CapturingModel, LayerInputs, PagedLayer
from vllm_sparse_plugin.tools.diagnostics.texts import Text


@dataclass(frozen=True)
class Caught:
    """Attention weight that layers with equally many KV heads find in the pages that each of them chose."""

    layers: list[int]
    """Indices of the layers, ascending."""
    weight: torch.Tensor
    """`[layer, anchor, head, anchor's head]` float64: share of the weight that the head has on the pages that the
    anchor's head reads. Mean over queries; 0 for an anchor behind the layer."""
    queries: int
    """Number of queries."""

    @property
    def heads(self) -> int:
        """Number of KV heads of each layer."""
        return self.weight.shape[-1]

    def joined(self, other: Caught) -> Caught:
        """Return the mean over the queries of both, which have the same layers."""
        queries = self.queries + other.queries
        total = self.weight * self.queries + other.weight * other.queries
        return Caught(self.layers, total / queries, queries)


class Source(NamedTuple):
    """Whose pages a layer reads."""

    anchor: int
    """The layer that chooses the pages, possibly this one."""
    heads: list[int]
    """For each KV head, the KV head of the anchor."""


@dataclass(frozen=True)
class Outcome:
    """Anchors, and the share of the attention weight on the pages read."""

    anchor_layers: list[int]
    """The layers that choose pages."""
    anchor_heads: list[list[int]]
    """See `ScoredSelection.anchor_heads`."""
    rows: list[dict[str, Any]]
    """By layer: its anchor, and the weight read with its own pages, with the anchor's and with equally spaced
    anchors."""
    weight: dict[str, float]
    """The same three weights, mean over layers and KV heads."""


def caught_in(layers: Sequence[LayerInputs | None], selection: Selection, first_dense_layers: int) -> list[Caught]:
    """Return the weight that layers find in the pages of each other, for each number of KV heads.

    Args:
        layers: attention inputs of the model's layers; None for a layer that selects no pages.
        selection: chooses the pages.
        first_dense_layers: number of first layers that select no pages.

    Raises:
        ConfigurationError: fewer than two layers select pages.
    """
    by_heads: dict[int, dict[int, LayerInputs]] = {}
    for index, inputs in enumerate(layers):
        if inputs is not None and index >= first_dense_layers:
            by_heads.setdefault(len(inputs.keys), {})[index] = inputs
    if (selecting := sum(map(len, by_heads.values()))) < 2:
        raise ConfigurationError(f"model: got layers that select pages: {selecting}, allowed: two or more")
    return [_caught_by(group, selection) for group in by_heads.values()]


def _caught_by(layers: Mapping[int, LayerInputs], selection: Selection) -> Caught:
    """Return the weight of layers with equally many KV heads."""
    queries, heads = next(iter(layers.values())).query.shape[:2]
    weight = torch.zeros(len(layers), len(layers), heads, heads, dtype=torch.float64)
    read: list[torch.Tensor] = []
    for place, inputs in enumerate(layers.values()):
        read.append(PagedLayer(inputs, selection).read())
        of_pages = inputs.page_weights(selection.page_size)
        for anchor, pages in enumerate(read):
            weight[place, anchor] = torch.einsum("qhp,qap->ha", of_pages, pages.float()).cpu() / queries
    return Caught(list(layers), weight, queries)


def caught_weight(
    model: CapturingModel,
    texts: Sequence[Text],
    selection: Selection,
    first_dense_layers: int,
    progress: Callable[[float], None],
) -> list[Caught]:
    """Return the mean of `caught_in` over the queries of all continuations of the texts.

    Args:
        model: runs the texts.
        texts: one or more.
        selection: chooses the pages.
        first_dense_layers: number of first layers that select no pages.
        progress: called with the tokens of each finished text.

    Raises:
        ConfigurationError: fewer than two layers select pages.
    """
    total: list[Caught] = []
    for text in texts:
        cache = model.prefill(text.document)
        for continuation in text.rest:
            found = caught_in(model.decode(cache, continuation).layers, selection, first_dense_layers)
            total = [before.joined(after) for before, after in zip(total, found, strict=True)] if total else found
        progress(text.length)
    return total


def place_anchors(loss: torch.Tensor, count: int) -> list[int]:
    """Return the anchor of each layer: `count` anchors that lose the least weight, each for the layers up to the next.

    Args:
        loss: `[layer, anchor]`, weight that a layer loses if it reads the pages of an anchor before it.
        count: number of anchors.
    """
    layers, loss = len(loss), loss.cpu()
    # By number of placed layers: what they lose, and their anchors.
    plans: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(count):
        longer: dict[int, tuple[float, list[int]]] = {}
        for first, (lost, anchors) in plans.items():
            for last in range(first + 1, layers + 1):
                total = lost + loss[first:last, first].sum().item()
                if last not in longer or total < longer[last][0]:
                    longer[last] = total, [*anchors, *[first] * (last - first)]
        plans = longer
    return plans[layers][1]


def pair_heads(weight: torch.Tensor, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each head the most weight that it finds in the pages of one head of the anchor, and that head.

    Args:
        weight: `[..., head, anchor's head]`.
        ranks: number of tensor-parallel ranks. A head reads pages of a head on its own rank.

    Returns:
        Two tensors `[..., head]`.
    """
    heads = weight.shape[-1]
    rank = torch.arange(heads, device=weight.device) * ranks // heads
    best = weight.masked_fill(rank[:, None] != rank, -torch.inf).max(dim=-1)
    return best.values, best.indices


def sources_of_anchors(caught: Sequence[Caught], share: int, ranks: int) -> dict[int, Source]:
    """Place anchors where the layers behind them lose the least weight, and pair the KV heads.

    Args:
        caught: weights that decide.
        share: layers per anchor.
        ranks: number of tensor-parallel ranks.

    Returns:
        What each layer reads, by its index.
    """
    sources = {}
    for group in caught:
        found, heads = pair_heads(group.weight, ranks)
        own = group.weight.diagonal(dim1=-2, dim2=-1).mean(dim=-1).diagonal()
        loss = (own[:, None] - found.mean(dim=-1)).fill_diagonal_(0)
        for place, anchor in enumerate(place_anchors(loss, -(-len(loss) // share))):
            paired = list(range(group.heads)) if place == anchor else heads[place, anchor].tolist()
            sources[group.layers[place]] = Source(group.layers[anchor], paired)
    return sources


def sources_by_stride(caught: Sequence[Caught], stride: int) -> dict[int, Source]:
    """Return what each layer reads if every `stride`th one chooses, as with a number as `anchor_layers`."""
    heads_of = {layer: group.heads for group in caught for layer in group.layers}
    anchors = anchors_of_layers(((layer, layer, heads_of[layer]) for layer in sorted(heads_of)), stride)
    return {layer: Source(anchors.get(layer, layer), list(range(heads))) for layer, heads in heads_of.items()}


def weight_read(caught: Sequence[Caught], sources: Mapping[int, Source]) -> dict[int, float]:
    """Return the weight that each layer reads, mean over its KV heads, by the index of the layer."""
    found = {}
    for group in caught:
        for place, layer in enumerate(group.layers):
            anchor, heads = sources[layer]
            read = group.weight[place, group.layers.index(anchor), range(group.heads), heads]
            found[layer] = float(read.mean())
    return found


def find_anchors(
    model: CapturingModel,
    fitting: Sequence[Text],
    judging: Sequence[Text],
    selection: Selection,
    first_dense_layers: int,
    num_layers: int,
    share: int,
    ranks: int,
    progress: Callable[[float], None],
) -> Outcome:
    """Find anchors by some texts and judge them on others.

    Args:
        model: runs the texts.
        fitting: texts to place anchors and pair KV heads by.
        judging: other texts.
        selection: chooses the pages.
        first_dense_layers: number of first layers that select no pages.
        num_layers: number of layers of the model.
        share: layers per anchor.
        ranks: number of tensor-parallel ranks.
        progress: called with the tokens of each finished text.

    Raises:
        ConfigurationError: fewer than two layers select pages.
    """
    fitted = caught_weight(model, fitting, selection, first_dense_layers, progress)
    sources = sources_of_anchors(fitted, share, ranks)
    judged = caught_weight(model, judging, selection, first_dense_layers, progress)
    of_each = {
        "each": weight_read(judged, sources_by_stride(judged, 1)),
        "anchors": weight_read(judged, sources),
        "spaced": weight_read(judged, sources_by_stride(judged, share)),
    }
    heads_of = {layer: group.heads for group in judged for layer in group.layers}
    total = sum(heads_of.values())
    return Outcome(
        sorted({anchor for anchor, _ in sources.values()}),
        [
            source.heads if (source := sources.get(layer)) and source.anchor != layer else []
            for layer in range(num_layers)
        ],
        [
            {
                "layer": layer,
                "anchor": sources[layer].anchor,
                **{name: found[layer] for name, found in of_each.items()},
            }
            for layer in sorted(sources)
        ],
        {name: sum(found[layer] * heads_of[layer] for layer in found) / total for name, found in of_each.items()},
    )
