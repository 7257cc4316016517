"""Copies of blocks equal copies of their pages, for every packing of the cache."""

import pytest
import torch
from sparse_kernels.paging import PagedTensor

from vllm_sparse_plugin.attention.packing import paged_keys_and_values

ROWS = torch.randn(6, 2, 64, 2 * 32, generator=torch.Generator().manual_seed(1))


def packings() -> dict[str, PagedTensor]:
    rows = {dtype: ROWS.to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)}
    found = {str(dtype): PagedTensor.from_rows(of[..., 32:], 8) for dtype, of in rows.items()}
    for isa in ("vec", "vec16", "amx"):
        keys, values = paged_keys_and_values(rows[torch.bfloat16], isa, 8)
        found |= {f"{isa} keys": keys, f"{isa} values": values}
    return found


@pytest.mark.parametrize("name", packings())
def test_blocks_are_their_pages(name):
    paged, blocks = packings()[name], torch.tensor([4, 0, 5])
    heads, pages = torch.arange(2)[:, None, None], torch.arange(8)
    wanted = paged.gather(blocks[:, None], heads, pages).flatten(1, 3)
    found = paged.gather_blocks(blocks)
    assert found.shape == (2, 3 * 64, 32)
    assert found.dtype == wanted.dtype
    assert torch.equal(found.float(), wanted.float())
