"""Computes the quarters of bfloat16 keys on a CPU, compiled. Reads and writes the cache in place.

The sums equal those of the reference: they are in float64, and their order does not change the rounded result.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from sparse_kernels.compiled import narrow, parallel_kernel, unpack_page, widen
from sparse_kernels.page_statistics.codes import LARGEST_BF16
from sparse_kernels.page_statistics.kinds.parts import Parts
from sparse_kernels.page_statistics.layout import PageStatistics
from sparse_kernels.paging import PagedTensor
from sparse_kernels.threads import use_threads

_LARGEST_BITS = np.uint16(0x7F7F)


@parallel_kernel()
def _update(
    keys,
    length,
    step,
    page_size,
    head_size,
    num_kv_heads,
    vectors,
    bits,
    spacing,
    dropped,
    codes,
    strides,
    steps,
    step_strides,
    blocks,
    pages,
):
    top, per_byte = (1 << bits) - 1, 8 // bits
    for row in numba.prange(blocks.size * num_kv_heads):
        block, page, head = blocks[row // num_kv_heads], pages[row // num_kv_heads], row % num_kv_heads
        by_dim = np.empty((head_size, page_size), np.float32)
        unpack_page(keys, length, step, block, head, page, by_dim, 0, 0, page_size)
        part = page_size // vectors
        parts = np.empty((vectors, head_size), np.float64)
        for j in range(vectors):
            for d in range(head_size):
                total = 0.0
                for t in range(j * part, (j + 1) * part):
                    total += by_dim[d, t]
                parts[j, d] = total / part
        for shared in range(vectors // per_byte):
            first = shared * per_byte
            power = 0.0
            for j in range(first, first + per_byte):
                for d in range(dropped, head_size):
                    power += np.float64(np.float32(parts[j, d])) ** 2
            power /= per_byte * (head_size - dropped)
            finite = power <= LARGEST_BF16
            step_bits = narrow(np.float32(np.sqrt(power) * spacing)) if finite else _LARGEST_BITS
            divisor = widen(step_bits) if widen(step_bits) > 0 else np.float32(1)
            start = block * strides[0] + head * strides[1] + page * strides[2] + shared * head_size
            for d in range(dropped, head_size):
                byte = 0
                for j in range(per_byte):
                    code = top * (1 - j % 2)
                    if finite:
                        scaled = np.float32(parts[first + j, d]) / divisor + np.float32(top / 2)
                        code = int(min(max(np.rint(scaled), 0), top))
                    byte |= code << bits * j
                # Together with the byte before it, this byte must not form an infinite or NaN bfloat16.
                if d % 2 and byte & 0x7F == 0x7F and codes[start + d - 1] & 0x80:
                    byte &= 0xFE
                codes[start + d] = byte
            at = block * step_strides[0] + head * step_strides[1] + page * step_strides[2] + shared * step_strides[3]
            steps[at] = step_bits


def update_page_statistics(
    keys: PagedTensor, statistics: PageStatistics, blocks: torch.Tensor, pages: torch.Tensor
) -> None:
    """See `api.update_page_statistics`."""
    addresses = keys.head_major
    stored, steps, _ = statistics.memory
    assert isinstance(statistics.kind, Parts)
    assert statistics.scales is not None
    codes = statistics.kind.codes
    use_threads(blocks.numel() * keys.num_kv_heads * keys.page_size * keys.head_size)
    _update(
        addresses.location,
        addresses.length,
        addresses.step,
        keys.page_size,
        keys.head_size,
        keys.num_kv_heads,
        codes.vectors,
        codes.bits,
        codes.spacing,
        codes.dropped,
        stored,
        statistics.vectors.stride(),
        steps,
        statistics.scales.stride(),
        blocks.numpy(),
        pages.numpy(),
    )
