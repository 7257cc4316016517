"""Computes page statistics in torch: the specification, and the path without compiled kernels.

A kind (`kinds/`) computes the record. This module rounds it to its format and stores it.
"""

from __future__ import annotations

import torch

from sparse_kernels.page_statistics.kinds import StatisticsKind
from sparse_kernels.page_statistics.layout import LARGEST, PageStatistics
from sparse_kernels.paging import PagedTensor


def summarise(kind: StatisticsKind, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the record of each page before rounding.

    Args:
        kind: defines the record.
        keys: `[..., page_size, head_size]`, any float dtype.

    Returns:
        The vectors `[..., kind.vectors, head_size]` and the spread `[...]` or None, float32.
    """
    vectors, spread = kind.summarise(keys.double())
    return vectors.float(), None if spread is None else spread.float()


def quantise(vectors: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds vectors to 8 bits with one scale each.

    No byte is 0x7f or 0xff, so any two bytes form a finite bfloat16 (see `StatisticsLayout`). In float8 these bytes
    are NaN; int8 does not use 127 and -1.

    Args:
        vectors: `[..., head_size]` float32.
        dtype: torch.int8 or torch.float8_e4m3fn.

    Returns:
        The quantised vectors `[..., head_size]` and their scales `[...]` bfloat16 (0 for a vector of zeros), such that
        `quantised * scale` is the vector up to one step.
    """
    largest = LARGEST[dtype]
    # The scale is rounded up, so that the largest element still fits.
    scale = (vectors.abs().amax(dim=-1) / largest * (1 + 2**-8)).bfloat16()
    scaled = vectors / torch.where(scale > 0, scale, 1.0).float().unsqueeze(-1)
    if dtype == torch.int8:
        step = scaled.round()
        scaled = torch.where(step == -1, torch.where(scaled > -1, 0.0, -2.0), step)
    return scaled.clamp(-largest, largest).to(dtype), scale


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Returns 8-bit floats as bytes, because torch cannot assign them by index; other tensors unchanged."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def update_page_statistics(
    keys: PagedTensor, statistics: PageStatistics, blocks: torch.Tensor, pages: torch.Tensor
) -> None:
    """See `api.update_page_statistics`."""
    heads = torch.arange(keys.num_kv_heads, device=blocks.device)
    vectors, spread = summarise(statistics.kind, keys.gather(blocks[:, None], heads, pages[:, None]))
    if statistics.scales is None:
        stored = vectors.to(statistics.vectors.dtype)
    elif statistics.kind.codes:
        stored, statistics.scales[blocks, :, pages] = statistics.kind.codes.pack(vectors)
    else:
        stored, scales = quantise(vectors, statistics.vectors.dtype)
        statistics.scales[blocks, :, pages] = scales
    shape = statistics.vectors.shape[3:]
    _bits(statistics.vectors)[blocks, :, pages] = _bits(stored.flatten(2)).unflatten(2, shape)
    if spread is not None and statistics.spread is not None:
        statistics.spread[blocks, :, pages] = spread.to(statistics.spread.dtype)


def as_stored(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Returns `x` as a cache of `dtype` stores it: with a scale `x / scale`, saturated as in vLLM."""
    if scale is None:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    statistics: PageStatistics | None,
    slot_mapping: torch.Tensor,
    page_size: int,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    """See `api.write_cache`."""
    block_size, head_size = cache.shape[2], key.shape[2]
    token = (slot_mapping >= 0).nonzero().squeeze(1)
    slot = slot_mapping[token]
    key, value = (_bits(part)[token].view(part.dtype) for part in (key, value))
    parts = as_stored(key, cache.dtype, key_scale), as_stored(value, cache.dtype, value_scale)
    _bits(cache)[slot // block_size, :, slot % block_size] = _bits(torch.cat(parts, dim=-1))
    if statistics is not None:
        last = slot[slot % page_size == page_size - 1]
        keys = PagedTensor.from_rows(cache[..., :head_size], page_size)
        update_page_statistics(keys, statistics, last // block_size, last % block_size // page_size)
