"""Page statistics on CPU, compiled: reads and writes the cache where the pages lie.

Of bfloat16 keys; int8 means and sketches. The sums are those of the reference, in float64, where their order does not
show in the result.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from sparse_kernels.compiled import narrow, unpack_page, widen
from sparse_kernels.page_statistics.kinds.sketch import PARTS, STEP, signs
from sparse_kernels.page_statistics.layout import PageStatistics
from sparse_kernels.paging import PagedTensor

_LARGEST = float(torch.finfo(torch.bfloat16).max)
_LARGEST_BITS = np.uint16(0x7F7F)


@numba.njit(nogil=True, cache=True)
def _quantise(mean, largest, stored, start):
    """Writes the means of a page in int8 and returns the bits of their scale."""
    amplitude = np.float32(0)
    for value in mean:
        # A NaN, once there, stays.
        amplitude = amplitude if amplitude > abs(value) or amplitude != amplitude else abs(value)
    # Rounded up, so that the largest element still fits.
    bits = narrow(amplitude / largest * np.float32(1 + 2**-8))
    scale = widen(bits)
    divisor = scale if scale > 0 else np.float32(1)
    for d in range(mean.size):
        scaled = mean[d] / divisor
        step = np.rint(scaled)
        if step == -1:
            step = np.float32(0) if scaled > -1 else np.float32(-2)
        stored[start + d] = np.int8(min(max(step, -largest), largest))
    return bits


@numba.njit(nogil=True, parallel=True, cache=True)
def _update(
    keys,
    length,
    step,
    page_size,
    head_size,
    num_kv_heads,
    mean,
    mean_strides,
    scale,
    std,
    scalar_strides,
    blocks,
    pages,
):
    for row in numba.prange(blocks.size * num_kv_heads):
        block, page, head = blocks[row // num_kv_heads], pages[row // num_kv_heads], row % num_kv_heads
        by_dim = np.empty((head_size, page_size), np.float32)
        unpack_page(keys, length, step, block, head, page, by_dim, 0, 0, page_size)
        means = np.empty(head_size, np.float32)
        variance = 0.0
        for d in range(head_size):
            total = 0.0
            for t in range(page_size):
                total += by_dim[d, t]
            average = total / page_size
            squares = 0.0
            for t in range(page_size):
                squares += (by_dim[d, t] - average) ** 2
            means[d] = average
            variance += squares / page_size
        scalars = block * scalar_strides[0] + head * scalar_strides[1] + page
        scale[scalars] = _quantise(
            means, np.float32(126), mean, block * mean_strides[0] + head * mean_strides[1] + page * head_size
        )
        std[scalars] = narrow(np.float32(np.sqrt(variance)))


def update_page_statistics(
    keys: PagedTensor, statistics: PageStatistics, blocks: torch.Tensor, pages: torch.Tensor
) -> None:
    """See `api.update_page_statistics`."""
    addresses = keys.head_major
    mean, scale, std = statistics.memory
    assert statistics.spread is not None
    _update(
        addresses.location,
        addresses.length,
        addresses.step,
        keys.page_size,
        keys.head_size,
        keys.num_kv_heads,
        mean,
        statistics.vectors.stride()[:2],
        scale,
        std,
        statistics.spread.stride()[:2],
        blocks.numpy(),
        pages.numpy(),
    )


@numba.njit(nogil=True, cache=True)
def _rotate(x, signs):
    """`kinds.sketch.rotate` of a float64 vector, in place."""
    size = x.size & -x.size
    x *= signs
    half = 1
    while half < size:
        for first in range(0, x.size, 2 * half):
            for i in range(first, first + half):
                low, high = x[i], x[i + half]
                x[i], x[i + half] = low + high, low - high
        half *= 2
    x /= np.sqrt(np.float64(size))


@numba.njit(nogil=True, parallel=True, cache=True)
def _update_sketches(
    keys, length, step, page_size, head_size, num_kv_heads, signs, sketches, strides, steps, step_strides, blocks, pages
):
    for row in numba.prange(blocks.size * num_kv_heads):
        block, page, head = blocks[row // num_kv_heads], pages[row // num_kv_heads], row % num_kv_heads
        by_dim = np.empty((head_size, page_size), np.float32)
        unpack_page(keys, length, step, block, head, page, by_dim, 0, 0, page_size)
        quarter = page_size // PARTS
        parts = np.empty((PARTS, head_size), np.float64)
        power = 0.0
        for j in range(PARTS):
            for d in range(head_size):
                total = 0.0
                for t in range(j * quarter, (j + 1) * quarter):
                    total += by_dim[d, t]
                parts[j, d] = total / quarter
            _rotate(parts[j], signs)
            for d in range(head_size):
                parts[j, d] = np.float32(parts[j, d])
                power += parts[j, d] * parts[j, d]
        power /= PARTS * head_size
        finite = power <= _LARGEST
        bits = narrow(np.float32(np.sqrt(power) * STEP)) if finite else _LARGEST_BITS
        divisor = widen(bits) if widen(bits) > 0 else np.float32(1)
        start = block * strides[0] + head * strides[1] + page * head_size
        for d in range(head_size):
            byte = 0
            for j in range(PARTS):
                code = 3 * (1 - j % 2)
                if finite:
                    code = int(min(max(np.rint(np.float32(parts[j, d]) / divisor + np.float32(1.5)), 0), 3))
                byte |= code << 2 * j
            # With the byte before it: no infinite or NaN bfloat16.
            if d % 2 and byte & 0x7F == 0x7F and sketches[start + d - 1] & 0x80:
                byte &= 0xFE
            sketches[start + d] = byte
        steps[block * step_strides[0] + head * step_strides[1] + page] = bits


def update_sketches(keys: PagedTensor, statistics: PageStatistics, blocks: torch.Tensor, pages: torch.Tensor) -> None:
    """See `api.update_page_statistics`."""
    addresses = keys.head_major
    sketches, steps, _ = statistics.memory
    assert statistics.scales is not None
    _update_sketches(
        addresses.location,
        addresses.length,
        addresses.step,
        keys.page_size,
        keys.head_size,
        keys.num_kv_heads,
        signs(keys.head_size).numpy(),
        sketches,
        statistics.vectors.stride()[:2],
        steps,
        statistics.scales.stride()[:2],
        blocks.numpy(),
        pages.numpy(),
    )


IMPLEMENTATIONS = {"mean_and_spread": update_page_statistics, "sketch": update_sketches}
"""By name of the kind; the others run the reference."""
