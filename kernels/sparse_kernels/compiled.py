"""What the compiled CPU kernels share. Imports Numba, so only they import it."""

from __future__ import annotations

import numba
import numpy as np

FASTMATH = {"reassoc", "contract"}
"""Reassociation lets the compiler use vector registers; NaN and infinity keep their meaning."""


@numba.njit(nogil=True, forceinline=True)
def widen(bits):
    """The float32 of bfloat16 bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@numba.njit(nogil=True, forceinline=True)
def narrow(value):
    """The bfloat16 bits of a float32: to nearest even, as torch rounds; one pattern for every NaN."""
    bits = np.float32(value).view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint16(0x7FC0) if value != value else np.uint16(rounded >> np.uint32(16))


@numba.njit(nogil=True, forceinline=True)
def unpack_page(location, length, step, block, head, within, unpacked, row, column, width):
    """Copies a page as float32 to the part of `unpacked` that begins at `row` and `column` and is `width` wide.

    Args:
        location: `PageAddresses.location` of bfloat16 pages.
        length: `PageAddresses.length`, which divides `width`; vectorises if it and `step` are compile-time constants.
        step: `PageAddresses.step`.
        block: physical block.
        head: KV head.
        within: page within the block.
        unpacked: `[rows, columns]` float32.
        row: first row to write.
        column: first column to write.
        width: elements of a row of the page.
    """
    elements, offsets, pages_per_group, per_block, per_head, per_group, per_page = location
    start = block * per_block + head * per_head
    start += within // pages_per_group * per_group + within % pages_per_group * per_page
    runs_per_row = width // length
    for run in range(offsets.size):
        # Unsigned, because a negative index would have to be looked for.
        first = np.uint64(start + offsets[run])
        to_row, to = np.uint64(row + run // runs_per_row), np.uint64(column + run % runs_per_row * length)
        for i in range(length):
            unpacked[to_row, to + np.uint64(i)] = widen(elements[first + np.uint64(i * step)])
