"""Blocks of a cache, copied to places of another one."""

import pytest
import torch
from sparse_kernels.block_copy import copy_blocks, triton

pytestmark = pytest.mark.usefixtures("interpreted")


def pools(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A filled pool of 20 blocks that lie apart, and a poisoned one of 30 places."""
    filled = torch.randn(20, 2, *shape).to(dtype)[:, 1]
    return filled, torch.full((30, *shape), torch.nan).to(dtype)


@pytest.mark.parametrize("copy", [copy_blocks, triton.copy_blocks])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(2, 16, 64), (1, 16, 32), (3, 48, 160)])
def test_each_place_gets_its_block_and_no_other_place_changes(copy, dtype, shape):
    source, target = pools(dtype, shape)
    blocks = torch.tensor([3, 0, 19, 3], dtype=torch.int32)
    places = torch.tensor([29, 4, 0, 7], dtype=torch.int32)
    copy(source, blocks, target, places)
    for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
        assert torch.equal(target[place].view(torch.uint8), source[block].contiguous().view(torch.uint8))
    others = [place for place in range(30) if place not in places.tolist()]
    assert target.float()[others].isnan().all()


def test_no_blocks_are_no_copy():
    source, target = pools(torch.bfloat16, (2, 16, 64))
    nothing = torch.empty(0, dtype=torch.int32)
    copy_blocks(source, nothing, target, nothing)
    assert target.isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(4, 2, 16, 32)}, "target: got blocks"),
        ({"places": torch.zeros(2, dtype=torch.int32)}, "places: got 2, allowed: 1"),
        ({"source": torch.zeros(4, 16, 2, 64).transpose(1, 2)}, "source: got strides"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    one = torch.zeros(1, dtype=torch.int32)
    given = {"source": torch.zeros(4, 2, 16, 64), "blocks": one, "target": torch.zeros(4, 2, 16, 64), "places": one}
    with pytest.raises(ValueError, match=message):
        copy_blocks(**given | change)
