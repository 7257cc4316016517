"""Entry point of the copy of blocks."""

from __future__ import annotations

import torch


def copy_blocks(source: torch.Tensor, blocks: torch.Tensor, target: torch.Tensor, places: torch.Tensor) -> None:
    """Copies blocks of a cache to places of another one: `target[places[i]] = source[blocks[i]]`.

    On a GPU the source may be host memory that the device sees. A few programs copy, so that other kernels run beside
    them.

    Args:
        source: `[num_blocks, ...]`, each block contiguous.
        blocks: `[n]` int32 on the device of the target.
        target: `[num_places, ...]`, blocks of the same shape and dtype, each contiguous.
        places: `[n]` int32 on the same device, each place once.

    Raises:
        ValueError: if shapes or dtypes disagree, or blocks are not contiguous.
    """
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"target: got blocks {list(target.shape[1:])} of {target.dtype}, allowed: {list(source.shape[1:])} of "
            f"{source.dtype}"
        )
    if len(blocks) != len(places):
        raise ValueError(f"places: got {len(places)}, allowed: {len(blocks)}, one for each block")
    for name, cache in (("source", source), ("target", target)):
        if len(cache) and not cache[0].is_contiguous():
            raise ValueError(f"{name}: got strides {cache.stride()}, allowed: contiguous blocks")
    if not len(blocks):
        return
    if source.is_cuda:
        from sparse_kernels.block_copy import triton

        triton.copy_blocks(source, blocks, target, places)
        return
    # torch cannot gather 8-bit floats, but it can gather their bits.
    source, target = (part.view(torch.uint8) if part.itemsize == 1 else part for part in (source, target))
    target[places.long()] = source[blocks.long()]
