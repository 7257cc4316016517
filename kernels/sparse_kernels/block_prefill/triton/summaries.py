"""Makes the summary keys of the pages of a batch on a GPU from the records in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sparse_kernels.batch import PrefillBatch
from sparse_kernels.block_prefill.tiles import Tiles
from sparse_kernels.page_statistics import PageStatistics

_LARGEST = tl.constexpr(2.0**90)
"""`_LARGEST` of the reference."""


# No prompt may wait for a compilation. Widths, and places among other requests, differ between steps.
@triton.jit(
    do_not_specialize=["table_stride", "pages_of_all"],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "context_start_ptr"],
)
def _summarise(
    vectors_ptr,
    scales_ptr,
    spread_ptr,
    table_ptr,
    seq_lens_ptr,
    context_start_ptr,
    keys_ptr,
    key_scales_ptr,
    deviation_ptr,
    vectors_strides,
    scales_strides,
    spread_strides,
    table_stride,
    pages_of_all,
    SUMMARY_KEYS: tl.constexpr,
    SUMMARY_SPREAD: tl.constexpr,
    VECTORS: tl.constexpr,
    KEYS: tl.constexpr,
    BITS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    ELEMENTS_PER_BYTE: tl.constexpr,
    DROPPED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    request = tl.program_id(2)
    head = tl.program_id(1).to(tl.int64)
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    num_pages = tl.load(seq_lens_ptr + request) // PAGE_SIZE
    if tl.program_id(0) * PAGES >= num_pages:
        return
    exists = page < num_pages
    block = tl.load(table_ptr + request.to(tl.int64) * table_stride + page // PAGES_PER_BLOCK, mask=exists, other=0).to(
        tl.int64
    )
    within = page % PAGES_PER_BLOCK
    dim = tl.arange(0, DIMS)
    real = exists[:, None] & (dim < HEAD_SIZE)[None, :]
    record = vectors_ptr + block * vectors_strides[0] + head * vectors_strides[1] + within * vectors_strides[2]
    vectors = ()
    for v in tl.static_range(VECTORS):
        # A byte of codes holds dimension d of several vectors, the first in its lowest bits, or two dimensions of one.
        row = v * BITS // 8 if BITS < 8 and ELEMENTS_PER_BYTE == 1 else v
        element = row * ROW_STRIDE + dim // ELEMENTS_PER_BYTE
        x = tl.load(record[:, None] + element[None, :], mask=real, other=0)
        if BITS < 8:
            shift = v * BITS % 8 if ELEMENTS_PER_BYTE == 1 else dim % ELEMENTS_PER_BYTE * BITS
            code = (x.to(tl.int32) >> shift) & ((1 << BITS) - 1)
            x = code.to(tl.float32) - ((1 << BITS) - 1) / 2
            x = tl.where(real & (dim >= DROPPED)[None, :], x, 0.0)
        else:
            x = x.to(tl.float32)
        if scales_ptr is not None:
            scale = scales_ptr + block * scales_strides[0] + head * scales_strides[1] + within * scales_strides[2]
            x *= tl.load(scale + row * scales_strides[3], mask=exists, other=0.0).to(tl.float32)[:, None]
        vectors = vectors + (x,)  # type: ignore[assignment]  # noqa: RUF005 - Triton's tuples only add
    spread = None
    if spread_ptr is not None:
        place = spread_ptr + block * spread_strides[0] + head * spread_strides[1] + within * spread_strides[2]
        spread = tl.load(place, mask=exists, other=0.0).to(tl.float32)
    keys = SUMMARY_KEYS(vectors, HEAD_SIZE)
    out = head * pages_of_all + tl.load(context_start_ptr + request) // PAGE_SIZE + page
    for k in tl.static_range(KEYS):
        key = tl.clamp(keys[k], -_LARGEST, _LARGEST)
        if key_scales_ptr is not None:
            scale = tl.max(tl.abs(key), axis=1) * (1 / 448)
            key = key / tl.where(scale > 0, scale, 1.0)[:, None]
            tl.store(key_scales_ptr + out * KEYS + k, scale, mask=exists)
        tl.store(
            keys_ptr + (out * KEYS + k)[:, None] * HEAD_SIZE + dim[None, :],
            key.to(keys_ptr.dtype.element_ty),
            mask=real,
        )
    if deviation_ptr is not None:
        deviation = SUMMARY_SPREAD(vectors, spread)
        tl.store(deviation_ptr + out, tl.minimum(deviation, _LARGEST), mask=exists)


@dataclass(frozen=True)
class _Summaries:
    """Summary keys of the pages of a batch, ordered as `Tiles.context_start`; undefined for incomplete pages."""

    keys: torch.Tensor
    """`[num_kv_heads, num_pages, summary_keys, head_size]`, bfloat16 or float8_e4m3fn."""
    scales: torch.Tensor | None
    """`[num_kv_heads, num_pages, summary_keys]` float32, factors of float8 keys; None for bfloat16 keys."""
    spread: torch.Tensor | None
    """`[num_kv_heads, num_pages]` float32; None for a kind without a spread."""


def page_summaries(
    statistics: PageStatistics, batch: PrefillBatch, tiles: Tiles, page_size: int, dtype: torch.dtype
) -> _Summaries:
    """Makes the summary keys of every complete page from the records in the cache, in a dtype of `_Summaries`."""
    kind, device = statistics.kind, batch.query.device
    heads, head_size = statistics.vectors.shape[1], statistics.head_size
    shape = heads, tiles.context_tokens // page_size, kind.summary_keys
    keys = torch.empty(*shape, head_size, dtype=dtype, device=device)
    key_scales = torch.empty(shape, dtype=torch.float32, device=device) if dtype.itemsize == 1 else None
    deviation = torch.empty(shape[:2], dtype=torch.float32, device=device) if kind.summary_has_spread else None
    codes, scales, spread = kind.codes, statistics.scales, statistics.spread
    at_a_time = 16
    _summarise[(triton.cdiv(max(batch.max_seq_tokens // page_size, 1), at_a_time), heads, batch.num_requests)](
        statistics.vectors,
        scales,
        spread,
        batch.block_table,
        batch.seq_lens,
        tiles.context_start,
        keys,
        key_scales,
        deviation,
        statistics.vectors.stride(),
        () if scales is None else scales.stride(),
        () if spread is None else spread.stride(),
        batch.block_table.stride(0),
        shape[1],
        SUMMARY_KEYS=kind.triton_summary_keys,
        SUMMARY_SPREAD=kind.triton_summary_spread,
        VECTORS=kind.vectors,
        KEYS=kind.summary_keys,
        BITS=codes.bits if codes else 8,
        ROW_STRIDE=statistics.row_stride if codes else head_size,
        ELEMENTS_PER_BYTE=codes.elements_per_byte if codes else 1,
        DROPPED=codes.dropped if codes else 0,
        PAGE_SIZE=page_size,
        PAGES_PER_BLOCK=statistics.pages_per_block,
        PAGES=at_a_time,
        HEAD_SIZE=head_size,
        DIMS=triton.next_power_of_2(head_size),
        num_warps=4,
    )
    return _Summaries(keys, key_scales, deviation)
