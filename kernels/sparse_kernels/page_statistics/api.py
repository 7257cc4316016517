"""Entry point of the page-statistics operation."""

from __future__ import annotations

import torch

from sparse_kernels.page_statistics import reference
from sparse_kernels.page_statistics.layout import PageStatistics
from sparse_kernels.paging import PagedTensor

_FLOAT8 = torch.float8_e4m3fn
_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CACHE_DTYPES = (torch.bfloat16, torch.float16, _FLOAT8)


def update_page_statistics(
    keys: PagedTensor, statistics: PageStatistics, blocks: torch.Tensor, pages: torch.Tensor
) -> None:
    """Recomputes the statistics of full pages from the keys in the cache, in place (UNIQUE: Eq. 1-2).

    It is idempotent: the statistics depend only on the keys, not on earlier contents of the block's memory.

    Args:
        keys: the cached keys.
        statistics: the views to write to.
        blocks: `[num_pages]` int64, physical block of each full page; may be empty.
        pages: `[num_pages]` int64, index of each page within its block.

    Raises:
        ValueError: if `blocks` and `pages` differ in shape, or keys and statistics in pages per block.
    """
    if blocks.shape != pages.shape or blocks.dim() != 1:
        raise ValueError(f"blocks and pages: got {tuple(blocks.shape)} and {tuple(pages.shape)}, allowed: equal 1-D")
    if keys.pages_per_block != statistics.pages_per_block:
        raise ValueError(
            f"statistics: got {statistics.pages_per_block} pages per block, allowed: the keys' {keys.pages_per_block}"
        )
    if not blocks.numel():
        return
    implementation = reference.update_page_statistics
    if blocks.device.type == "cpu" and keys.view.dtype == torch.bfloat16 and statistics.kind.name == "quarters":
        from sparse_kernels.page_statistics import cpu

        implementation = cpu.update_page_statistics
    implementation(keys, statistics, blocks, pages)


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    statistics: PageStatistics | None,
    slot_mapping: torch.Tensor,
    page_size: int,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Stores new keys and values in the cache, and the statistics of every page that they complete, in place.

    The statistics are those of `update_page_statistics` for the keys as the cache stores them. In a float8 cache these
    are `key / key_scale`, in these units (UNIQUE: Eq. 1-2). Only pages whose last token is written change. The write is
    idempotent. On a GPU it is one launch that does not wait for the host and does not depend on slot values, so a CUDA
    graph may hold it. Only on a GPU, statistics of keys that are not finite are still finite words.

    Args:
        key: `[at least num_slots, num_kv_heads, head_size]`, bfloat16, float16 or float32. For a float8_e4m3fn cache
            also float8_e4m3fn, stored unchanged, like the value. Heads and tokens may have gaps. Rows beyond
            `num_slots` are padding.
        value: like `key`.
        cache: the token rows of the blocks, `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, bfloat16,
            float16 or float8_e4m3fn; a row is a key followed by a value.
        statistics: the views to write to; None for a cache without statistics.
        slot_mapping: `[num_slots]` int64, `block * block_size + offset` of each token, negative for tokens that are
            not stored. Slots are unique, and tokens of one page are adjacent in ascending order.
        page_size: tokens per page, a power of two.
        key_scale: one float32 element: a float8 cache holds `key / key_scale`, rounded and saturated at 448. Other
            caches ignore it.
        value_scale: like `key_scale`, for the values.

    Raises:
        ValueError: if shapes, dtypes or strides differ from the above.
    """
    _check_write(key, value, cache, statistics, slot_mapping, page_size)
    if cache.dtype != _FLOAT8 or key.dtype == _FLOAT8:
        key_scale = value_scale = None
    elif key_scale is None or value_scale is None or {key_scale.dtype, value_scale.dtype} != {torch.float32}:
        raise ValueError("key_scale and value_scale: allowed for a float8 cache: two float32 tensors of one element")
    if slot_mapping.shape[0] == 0:
        return
    implementation = reference.write_cache
    if key.is_cuda:
        from sparse_kernels.page_statistics import triton

        implementation = triton.write_cache
    implementation(key, value, cache, statistics, slot_mapping, page_size, key_scale, value_scale)


def _check_write(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    statistics: PageStatistics | None,
    slot_mapping: torch.Tensor,
    page_size: int,
) -> None:
    _, num_kv_heads, block_size, width = cache.shape
    stored = key.dtype == value.dtype == cache.dtype
    given = key.dtype in _INPUT_DTYPES and value.dtype in _INPUT_DTYPES
    if not (stored or given) or cache.dtype not in _CACHE_DTYPES:
        raise ValueError(
            f"key, value and cache: got {key.dtype}, {value.dtype} and {cache.dtype}, allowed: bfloat16, float16 or "
            "float32 in bfloat16, float16 or float8_e4m3fn, or all float8_e4m3fn"
        )
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1 or not slot_mapping.is_contiguous():
        raise ValueError(
            f"slot_mapping: got {slot_mapping.dtype} {tuple(slot_mapping.shape)}, allowed: contiguous 1-D torch.int64"
        )
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[1:] != (num_kv_heads, width // 2) or tensor.shape[0] < slot_mapping.shape[0]:
            raise ValueError(
                f"{name}: got {tuple(tensor.shape)}, allowed: at least {slot_mapping.shape[0]} rows of the cache's "
                f"{num_kv_heads} heads of size {width // 2}"
            )
    if key.stride(2) != 1 or value.stride(2) != 1 or cache.stride(3) != 1:
        raise ValueError("key, value and cache: allowed: a contiguous last dimension")
    if page_size < 1 or page_size & (page_size - 1) or block_size % page_size:
        raise ValueError(
            f"page_size: got {page_size}, allowed: a power of two that divides the block size {block_size}"
        )
    if statistics is None:
        return
    got = *statistics.vectors.shape[1:3], statistics.head_size
    if got != (num_kv_heads, block_size // page_size, width // 2):
        raise ValueError(
            f"statistics: got {got[0]} heads, {got[1]} pages per block, head size {got[2]}, allowed: {num_kv_heads} "
            f"heads, {block_size // page_size} pages per block, head size {width // 2}"
        )
