"""Which layers read the pages of an anchor layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from vllm_sparse_plugin.config.schema import KEY, ResolvedConfig

Layer = TypeVar("Layer")


def anchors_of_layers(
    layers: Iterable[tuple[Layer, int, int]], anchor_layers: int | tuple[int, ...]
) -> dict[Layer, Layer]:
    """Returns the anchor of each layer that reads the pages of another layer.

    The anchor of a layer is the nearest one before it with as many KV heads. A layer without one chooses its own pages.

    Args:
        layers: the layers that select pages, in the order of the model: a layer, its index, and its number of KV heads.
        anchor_layers: see `ScoredSelection.anchor_layers`. A number counts these layers.
    """
    anchors, before = dict[Layer, Layer](), dict[int, Layer]()
    for place, (layer, index, heads) in enumerate(layers):
        chooses = place % anchor_layers == 0 if isinstance(anchor_layers, int) else index in anchor_layers
        if chooses or heads not in before:
            before[heads] = layer
        else:
            anchors[layer] = before[heads]
    return anchors


def refuse_anchors(config: ResolvedConfig, num_layers: int) -> Iterator[tuple[str, object, str]]:
    """Yields the field, the value and the allowed values of anchors that a model of `num_layers` layers cannot have."""
    anchors, heads = config.anchor_layers, config.anchor_heads
    if not isinstance(anchors, int):
        first, last = config.config.first_dense_layers, num_layers - 1
        if anchors[0] < first or anchors[-1] > last:
            yield f"{KEY}.selection.anchor_layers", list(anchors), f"layers from {first} to {last}"
    if heads is not None and len(heads) != num_layers:
        yield f"{KEY}.selection.anchor_heads", f"{len(heads)} lists", f"one for each of {num_layers} layers"
