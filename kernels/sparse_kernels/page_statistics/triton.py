"""Writes keys, values and the statistics of completed pages to the KV cache of a GPU, in one launch.

It needs Triton 3.4 or newer. 8-bit floats, in the cache or as means, need compute capability 8.9.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparse_kernels.page_statistics.layout import FEW_SLOTS, LARGEST, PageStatistics

# Adding and subtracting 1.5 * 2**23 rounds a small float32 to the nearest integer, ties to even. Triton's rounding
# needs libdevice, which its interpreter does not have.
_ROUND = tl.constexpr(1.5 * 2**23)
_LARGEST_E4M3 = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)


class _Launch(NamedTuple):
    """How a launch is split into programs, by its number of slots."""

    num_slots: float
    """Largest number of slots for this row of the table."""
    elements: int
    """Key elements of one token that a program copies; determines the number of heads per program."""


# A decode step has about as many tokens as the device has multiprocessors; small programs use more of them. A prefill
# fills the device, so it needs fewer programs.
_LAUNCHES = (_Launch(FEW_SLOTS, 128), _Launch(float("inf"), 1024))
# A warp takes this many elements of a page's keys, 64 per thread, so the page stays in registers between its mean and
# its deviations. With pages of 8 tokens, a thread then copies 8 elements, 16 bytes, of a token's key.
_PAGE_ELEMENTS_PER_WARP = 2048


@triton.jit
def _as_stored(x, scale, dtype: tl.constexpr):
    # Values of the cache's dtype keep their bits, including those of NaN.
    if scale is not None or x.dtype != dtype:
        x = x.to(tl.float32)
    if scale is not None:
        # As vLLM's `reshape_and_cache_flash`: the division is exact and saturates, and NaN stays NaN.
        x = tl.clamp(tl.div_rn(x, scale), -_LARGEST_E4M3, _LARGEST_E4M3, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def _write_cache(
    key_ptr,
    value_ptr,
    cache_ptr,
    slot_ptr,
    key_scale_ptr,
    value_scale_ptr,
    vectors_ptr,
    scales_ptr,
    spread_ptr,
    key_strides,
    value_strides,
    cache_strides,
    vectors_strides,
    scales_strides,
    spread_strides,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SUMMARISE: tl.constexpr,
    PACK: tl.constexpr,
    CODE_ROWS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    ELEMENTS_PER_BYTE: tl.constexpr,
    DROPPED: tl.constexpr,
    VECTORS: tl.constexpr,
    LARGEST: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first_head = (tl.program_id(1) * HEADS).to(tl.int64)
    # The elements of all heads of a program form one dimension, so the compiler keeps a page's rows in one thread.
    element = tl.arange(0, HEADS * DIMS)
    head = first_head + element // DIMS
    dim = element % DIMS
    exists = (head < NUM_KV_HEADS) & (dim < HEAD_SIZE)
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    key_scale = None
    value_scale = None
    if key_scale_ptr is not None:
        key_scale = tl.load(key_scale_ptr)
        value_scale = tl.load(value_scale_ptr)

    # The rows are loaded before the slot is known: one wait instead of two.
    slot = tl.load(slot_ptr + token)
    key_row = key_ptr + token * key_strides[0] + head * key_strides[1] + dim
    value_row = value_ptr + token * value_strides[0] + head * value_strides[1] + dim
    key = tl.load(key_row, mask=exists, other=0.0)
    value = tl.load(value_row, mask=exists, other=0.0)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    cache_row = cache_ptr + block * cache_strides[0] + head * cache_strides[1] + offset * cache_strides[2] + dim
    tl.store(cache_row, _as_stored(key, key_scale, dtype), mask=exists)
    tl.store(cache_row + HEAD_SIZE, _as_stored(value, value_scale, dtype), mask=exists)

    if vectors_ptr is not None:  # noqa: SIM102 - decided when compiling, the next one when running
        if slot % PAGE_SIZE == PAGE_SIZE - 1:
            # Other programs of this launch may not have stored the page's earlier keys yet. Those keys are in the
            # preceding rows of the batch and are read from there. Older keys are in the cache.
            age = tl.arange(0, PAGE_SIZE).to(tl.int64)
            earlier = tl.load(slot_ptr + (token - age), mask=age <= token, other=-1)
            here = (earlier == slot - age)[:, None]
            age = age[:, None]
            written = tl.load(key_row[None, :] - age * key_strides[0], mask=here & exists[None, :], other=0.0)
            cached = tl.load(cache_row[None, :] - age * cache_strides[2], mask=~here & exists[None, :], other=0.0)
            written = _as_stored(written, key_scale, dtype).to(tl.float32)
            keys = tl.where(here, written, cached.to(tl.float32))

            record = SUMMARISE(keys, PAGE_SIZE, HEADS, DIMS)

            page = offset // PAGE_SIZE
            heads = first_head + tl.arange(0, HEADS)
            head_exists = heads < NUM_KV_HEADS
            record_page = vectors_ptr + block * vectors_strides[0] + page * vectors_strides[2]
            if PACK is not None:
                packed, steps = PACK(record, HEAD_SIZE, HEADS, DIMS)
                row_bytes: tl.constexpr = DIMS // ELEMENTS_PER_BYTE
                byte = tl.arange(0, HEADS * row_bytes)
                byte_head = first_head + byte // row_bytes
                byte = byte % row_bytes
                stored = (byte_head < NUM_KV_HEADS) & (byte >= DROPPED // ELEMENTS_PER_BYTE)
                stored = stored & (byte < HEAD_SIZE // ELEMENTS_PER_BYTE)
                for row in tl.static_range(CODE_ROWS):
                    place = record_page + byte_head * vectors_strides[1] + row * ROW_STRIDE + byte
                    tl.store(place, packed[row], mask=stored)
                    step_page = scales_ptr + block * scales_strides[0] + page * scales_strides[2]
                    step_page += row * scales_strides[3]
                    tl.store(step_page + heads * scales_strides[1], steps[row], mask=head_exists)
            for v in tl.static_range(VECTORS if PACK is None else 0):
                vector = record[v]
                if LARGEST is not None:
                    # This is the arithmetic of `reference.quantise`.
                    vector = tl.reshape(vector, (HEADS, DIMS))
                    scale = tl.div_rn(tl.max(tl.abs(vector), axis=1), LARGEST) * (1 + 2**-8)
                    scale = scale.to(tl.bfloat16)
                    scale_page = scales_ptr + block * scales_strides[0] + page * scales_strides[2] + v
                    tl.store(scale_page + heads * scales_strides[1], scale, mask=head_exists)
                    divisor = scale.to(tl.float32)
                    scaled = tl.div_rn(vector, tl.where(divisor > 0, divisor, 1.0)[:, None])
                    if vectors_ptr.dtype.element_ty == tl.int8:
                        step = (scaled + _ROUND) - _ROUND
                        scaled = tl.where(step == -1.0, tl.where(scaled > -1.0, 0.0, -2.0), step)
                    vector = tl.reshape(tl.clamp(scaled, -LARGEST, LARGEST), (HEADS * DIMS,))
                place = record_page + head * vectors_strides[1] + v * HEAD_SIZE + dim
                tl.store(place, vector.to(vectors_ptr.dtype.element_ty), mask=exists)
            if spread_ptr is not None:
                spread_page = spread_ptr + block * spread_strides[0] + page * spread_strides[2]
                tl.store(spread_page + heads * spread_strides[1], record[VECTORS].to(tl.bfloat16), mask=head_exists)


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
    num_slots = slot_mapping.shape[0]
    _, num_kv_heads, head_size = key.shape
    kind = codes = vectors = scales = spread = None
    if statistics is not None:
        codes = statistics.kind.codes
        kind, vectors, scales, spread = statistics.kind, statistics.vectors, statistics.scales, statistics.spread
    dims = triton.next_power_of_2(head_size)
    elements = next(launch.elements for launch in _LAUNCHES if num_slots <= launch.num_slots)
    heads = min(max(elements // dims, 1), triton.next_power_of_2(num_kv_heads))
    _write_cache[(num_slots, triton.cdiv(num_kv_heads, heads))](
        key,
        value,
        cache,
        slot_mapping,
        key_scale,
        value_scale,
        vectors,
        scales,
        spread,
        key.stride(),
        value.stride(),
        cache.stride(),
        vectors.stride() if vectors is not None else (),
        scales.stride() if scales is not None else (),
        spread.stride() if spread is not None else (),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=cache.shape[2],
        PAGE_SIZE=page_size,
        SUMMARISE=kind.triton_summarise if kind is not None else None,
        PACK=kind.triton_pack if kind is not None else None,
        CODE_ROWS=codes.rows if codes is not None else 0,
        ROW_STRIDE=statistics.row_stride if statistics is not None else 0,
        ELEMENTS_PER_BYTE=codes.elements_per_byte if codes is not None else 1,
        DROPPED=codes.dropped if codes is not None else 0,
        VECTORS=kind.vectors if kind is not None else 0,
        LARGEST=LARGEST.get(vectors.dtype) if vectors is not None else None,
        HEADS=heads,
        DIMS=dims,
        num_warps=min(max(heads * dims * page_size // _PAGE_ELEMENTS_PER_WARP, 1), 16),
    )
