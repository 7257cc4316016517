"""Which layers choose pages, and which layers read the pages of an anchor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_sparse_plugin.config import KEY, ResolvedConfig
from vllm_sparse_plugin.config.anchors import anchors_of_layers
from vllm_sparse_plugin.errors import ConfigurationError


def anchors_of(
    selecting: Mapping[str, Attention],
    anchor_layers: int | tuple[int, ...],
    everywhere: Mapping[str, Attention],
) -> dict[str, str]:
    """Returns the anchor of each layer that reads the pages of another layer, see `anchors_of_layers`.

    A layer whose listed anchor has another metadata builder chooses its own pages.

    Args:
        selecting: the layers that select pages and share a metadata builder.
        anchor_layers: see `ScoredSelection.anchor_layers`.
        everywhere: all layers of this worker that select pages.
    """
    # A number counts the layers of one builder, which may read each other's pages.
    layers = selecting if isinstance(anchor_layers, int) else everywhere
    ordered = sorted(layers, key=extract_layer_index)
    found = anchors_of_layers(
        ((name, extract_layer_index(name), layers[name].num_kv_heads) for name in ordered), anchor_layers
    )
    return {name: anchor for name, anchor in found.items() if name in selecting and anchor in selecting}


def heads_of_anchors(
    anchors: Mapping[str, str],
    layers: Mapping[str, Attention],
    sparse: ResolvedConfig,
    first: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Returns `LayerPlan.anchor_heads` of the layers whose anchor is a listed one.

    Args:
        anchors: see `anchors_of`.
        layers: the layers by name.
        sparse: the settings of the plugin.
        first: the first KV head of this worker.
        device: the device of the layers.

    Raises:
        ConfigurationError: for a KV head of another tensor-parallel worker, or another number of KV heads.
    """
    found = {}
    for name, anchor in anchors.items():
        index, count = extract_layer_index(name), layers[name].num_kv_heads
        listed = isinstance(sparse.anchor_layers, tuple) and extract_layer_index(anchor) in sparse.anchor_layers
        given = sparse.anchor_heads[index] if sparse.anchor_heads is not None else ()
        if not given or not listed:
            continue
        local = [head - first for head in given[first : first + count]]
        if len(local) != count or not all(0 <= head < count for head in local):
            raise ConfigurationError(
                f"{KEY}.selection.anchor_heads: got {list(given)} for layer {index}, allowed: as many as it has KV "
                "heads, each of the same tensor-parallel worker; vllm-sparse anchors --tensor-parallel-size finds them"
            )
        found[name] = torch.tensor(local, device=device)
    return found


def expect_selecting(
    layers: Mapping[str, Attention], selecting: Mapping[str, Attention], anchor_layers: int | tuple[int, ...]
) -> None:
    """Raises ConfigurationError for an anchor layer that selects no pages."""
    if isinstance(anchor_layers, int):
        return
    for name in layers:
        index = extract_layer_index(name)
        if name not in selecting and index in anchor_layers:
            raise ConfigurationError(
                f"{KEY}.selection.anchor_layers: got layer {index}, allowed: layers that attend to their whole context"
            )
