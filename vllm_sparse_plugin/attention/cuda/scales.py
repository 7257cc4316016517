"""Scales of 8-bit queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sparse_kernels.cache import KVCache


def query_scale(query: torch.Tensor, layer: Any) -> torch.Tensor | None:
    """Returns a layer's scale of float8 queries; None for 16-bit queries."""
    scale: torch.Tensor = layer._q_scale
    return scale if query.dtype.itemsize == 1 else None


def scaled(cache: KVCache, layer: Any) -> KVCache:
    """Returns a cache with the layer's scales; a 16-bit cache unchanged."""
    if cache.keys.view.dtype.itemsize > 1:
        return cache
    return replace(cache, key_scale=layer._k_scale, value_scale=layer._v_scale)
