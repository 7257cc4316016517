"""Views of a block that vLLM's CPU attention has packed, as pages of keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sparse_kernels.paging import PagedTensor
from vllm import _custom_ops as ops

from vllm_sparse_plugin.errors import ConfigurationError

_Packing = Callable[[torch.Tensor, int], PagedTensor]
_TILE = 16


def _key_columns(half: torch.Tensor, page_size: int) -> PagedTensor:
    """Returns pages of keys packed transposed, `[head, block]`."""
    head_size = half.shape[-1]
    view = half.flatten(2).unflatten(2, (head_size, -1, 1, page_size))
    return PagedTensor(view.permute(0, 1, 3, 4, 2, 5), (1,), page_size, head_size)


def _key_pairs(half: torch.Tensor, page_size: int) -> PagedTensor:
    """Returns pages of keys packed as pairs of elements, 16 tokens at a time: `[block / 16, head / 2, 16, 2]`."""
    head_size = half.shape[-1]
    span = min(_TILE, page_size)
    view = half.flatten(2).unflatten(2, (-1, max(1, page_size // _TILE), head_size // 2, _TILE // span, span, 2))
    return PagedTensor(view.permute(0, 1, 2, 5, 3, 4, 6, 7), (0, 2), page_size, head_size)


def _value_pairs(half: torch.Tensor, page_size: int) -> PagedTensor:
    """Returns pages of values packed as pairs of tokens, 16 elements at a time: `[head / 16, block / 2, 16, 2]`."""
    head_size = half.shape[-1]
    view = half.flatten(2).unflatten(2, (head_size // _TILE, -1, page_size // 2, _TILE, 2))
    return PagedTensor(view.permute(0, 1, 3, 2, 4, 5, 6).unsqueeze(3), (1, 3), page_size, head_size)


_PACKINGS: dict[str, tuple[_Packing, _Packing]] = {
    "amx": (_key_pairs, _value_pairs),
    "vec": (_key_columns, PagedTensor.from_rows),
    "vec16": (_key_columns, PagedTensor.from_rows),
}


def supported_isa(preferred: str) -> str:
    """Returns the instruction set for vLLM's CPU attention: the preferred one if its packing is known."""
    return preferred if preferred in _PACKINGS else "vec"


def split_keys_and_values(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the packed keys and values of each block and head: `[num_blocks, num_kv_heads, block_size, head_size]`
    each.

    Args:
        tokens: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, the last two dimensions contiguous.
    """
    num_blocks, num_kv_heads, block_size, _ = tokens.shape
    keys, values = tokens.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, dim=2)
    return keys, values


def paged_keys_and_values(tokens: torch.Tensor, isa: str, page_size: int) -> tuple[PagedTensor, PagedTensor]:
    """Returns pages of keys and values of a cache that vLLM's CPU attention has packed for `isa`.

    Args:
        tokens: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, the last two dimensions contiguous.
        isa: instruction set of the attention kernel, see `supported_isa`.
        page_size: tokens per page; divides the block size.
    """
    keys, values = split_keys_and_values(tokens)
    pack_keys, pack_values = _PACKINGS[isa]
    return pack_keys(keys, page_size), pack_values(values, page_size)


def check_packing(isa: str, block_size: int, head_size: int, page_size: int, dtype: torch.dtype) -> None:
    """Writes one block with vLLM's kernel and reads it back page by page.

    Raises:
        ConfigurationError: if this build of vLLM packs blocks in an unknown way.
    """
    tokens = torch.zeros(1, 1, block_size, 2 * head_size, dtype=dtype)
    # Small integers are exact in bfloat16. A prime period keeps the pattern from repeating within a page.
    codes = torch.arange(block_size * head_size) % 251
    keys = codes.view(block_size, 1, head_size).to(dtype)
    values = ((codes * 7) % 241).view(block_size, 1, head_size).to(dtype)
    packed_keys, packed_values = split_keys_and_values(tokens)
    slots = torch.arange(block_size)
    ops.cpu_attn_reshape_and_cache(
        keys, values, packed_keys, packed_values, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    pages = torch.arange(block_size // page_size)
    zero = torch.zeros_like(pages)
    for paged, written in zip(paged_keys_and_values(tokens, isa, page_size), (keys, values), strict=True):
        if not torch.equal(paged.gather(zero, zero, pages).flatten(0, 1), written.squeeze(1)):
            raise ConfigurationError(
                f"vLLM's CPU attention: got an unknown block packing for {isa!r}, allowed: that of vLLM 0.32 and 0.33"
            )
