"""Launch settings of the kernels of the soft mask."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparse_kernels.masked_attention.packing import Tiles
from sparse_kernels.masked_attention.triton.scores import PIECE, Call

_MUCH_SHARED_MEMORY = 160 << 10
"""Shared memory of a multiprocessor, in bytes, that these launches need. With less, tiles have half the rows and half
the columns."""


class Launch(NamedTuple):
    """Launch settings of a kernel."""

    rows: int
    """Query heads of tokens that a program handles at a time."""
    columns: int
    """Keys, or vectors of pages, that a program handles at a time."""
    num_warps: int
    num_stages: int
    """At least 2 for gradients of queries: log m of a tile must be loaded before any thread overwrites it."""


def _shape(call: Call, launch: Launch, device: torch.device) -> tuple[dict[str, int], int]:
    """Returns the compile-time constants and launch settings of a kernel, and its columns."""
    shape = call.heads()
    smaller = max(shape["DIMS"] // 128, 1)
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    if gpu is not None and gpu.shared_memory_per_multiprocessor < _MUCH_SHARED_MEMORY:
        smaller *= 2
    shape |= {
        "PADDED": call.padded_group, "TOKENS": min(call.tokens(launch.rows // smaller), PIECE),
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
    }  # fmt: skip
    return shape, launch.columns // smaller


def keys_shape(call: Call, launch: Launch, device: torch.device) -> dict[str, int]:
    """Returns the compile-time constants and launch settings of an attention kernel."""
    shape, columns = _shape(call, launch, device)
    return shape | {"KEYS": max(columns, call.mask.page_size)}


def vectors_shape(call: Call, launch: Launch, device: torch.device) -> dict[str, int]:
    """Returns the compile-time constants and launch settings of a kernel for the scores' gradients."""
    shape, columns = _shape(call, launch, device)
    return shape | {"VECTORS": call.vectors, "PAGES": max(columns // call.vectors, 1)}


def grid(call: Call, pieces: Tiles, shape: dict[str, int]) -> tuple[int, int]:
    """Returns the grid of a kernel that works on tiles of pieces."""
    return len(pieces.start) * (PIECE // shape["TOKENS"]), call.num_kv_heads
