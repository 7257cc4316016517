"""Checks anchor layers against the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_sparse_plugin.config.schema import KEY, ResolvedConfig


def refuse_anchors(config: ResolvedConfig, num_layers: int) -> Iterator[tuple[str, object, str]]:
    """Yields the field, the value and the allowed values of anchors that a model of `num_layers` layers cannot have."""
    anchors, heads = config.anchor_layers, config.anchor_heads
    if not isinstance(anchors, int):
        first, last = config.config.first_dense_layers, num_layers - 1
        if anchors[0] < first or anchors[-1] > last:
            yield f"{KEY}.selection.anchor_layers", list(anchors), f"layers from {first} to {last}"
    if heads is not None and len(heads) != num_layers:
        yield f"{KEY}.selection.anchor_heads", f"{len(heads)} lists", f"one for each of {num_layers} layers"
