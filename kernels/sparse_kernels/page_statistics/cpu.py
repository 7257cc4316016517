"""Mean and spread of pages on CPU, compiled: reads and writes the cache where the pages lie. bfloat16 keys, int8 means.

The sums are those of the reference, in float64, where their order does not show in the result.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from sparse_kernels.compiled import narrow, unpack_page, widen
from sparse_kernels.page_statistics.layout import PageStatistics
from sparse_kernels.paging import PagedTensor


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


IMPLEMENTATIONS = {"mean_and_spread": update_page_statistics}
"""By name of the kind; the others run the reference."""
