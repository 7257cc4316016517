"""Copies blocks on a GPU: a few programs take parts of blocks in turn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PROGRAMS = 32
"""The bus is full with fewer. More would take multiprocessors from the kernels that run beside."""
_WORDS = 2048
"""Words of eight bytes that a program has under way at once."""


# Numbers of blocks differ between steps. A kernel specialised for one number would not serve the next.
@triton.jit(do_not_specialize=["num_parts"])
def _copy(
    source_ptr,
    blocks_ptr,
    target_ptr,
    places_ptr,
    num_parts,
    source_stride,
    target_stride,
    BLOCK_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    parts_per_block: tl.constexpr = (BLOCK_WORDS + WORDS - 1) // WORDS
    for part in range(tl.program_id(0), num_parts, PROGRAMS):
        index = part // parts_per_block
        word = part % parts_per_block * WORDS + tl.arange(0, WORDS)
        block = tl.load(blocks_ptr + index).to(tl.int64)
        place = tl.load(places_ptr + index).to(tl.int64)
        exists = word < BLOCK_WORDS
        words = tl.load(source_ptr + block * source_stride + word, mask=exists)
        tl.store(target_ptr + place * target_stride + word, words, mask=exists)


def copy_blocks(source: torch.Tensor, blocks: torch.Tensor, target: torch.Tensor, places: torch.Tensor) -> None:
    """See `api.copy_blocks`."""
    # A block holds whole words: its smallest unit is a row of 16 elements.
    source, target = (part.flatten(1).view(torch.int64) for part in (source, target))
    block_words = source.shape[1]
    words = min(_WORDS, triton.next_power_of_2(block_words))
    num_parts = len(blocks) * triton.cdiv(block_words, words)
    _copy[(_PROGRAMS,)](
        source, blocks, target, places, num_parts, source.stride(0), target.stride(0),
        BLOCK_WORDS=block_words, WORDS=words, PROGRAMS=_PROGRAMS, num_warps=8,
    )  # fmt: skip
