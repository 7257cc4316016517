"""Quarters and sketches of pages: packing, rotation, and scores against their formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_kernels.page_score import reference as score_reference
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_statistics import KINDS, StatisticsLayout, reference, update_page_statistics
from sparse_kernels.page_statistics.kinds.rotation import rotate, rotate_back
from sparse_kernels.paging import PagedTensor
from support.paged import PagedBatch, make_batch

CONTEXTS = [1000, 8, 7, 505, 64, 72, 999]
SHAPES = [(2, 4, 64, 8), (2, 1, 128, 16), (1, 7, 240, 32)]
"""Each is compiled."""
NAMES = ("quarters", "sketch")
BOTH = pytest.mark.parametrize("kind", NAMES)
CODES = {name: KINDS[name].codes for name in NAMES}


def batch_of(kind: str, num_kv_heads: int, head_size: int, page_size: int) -> PagedBatch:
    (statistics,) = KINDS[kind].formats
    return make_batch(CONTEXTS, num_kv_heads, head_size, page_size=page_size, statistics=statistics, kind=kind)


def as_kept(kind: str, vectors: torch.Tensor) -> torch.Tensor:
    """Vectors `[..., vectors, head_size]` float32 after storing and reading, float64."""
    packed, steps = CODES[kind].pack(vectors)
    return CODES[kind].unpack(packed).double() * CODES[kind].per_vector(steps).double().unsqueeze(-1)


def test_bytes_of_a_small_sketch() -> None:
    vectors = torch.tensor([[3.0, -3.0], [1.0, 0.1], [-1.0, -0.1], [-3.0, 3.0]])
    packed, step = CODES["sketch"].pack(vectors)
    assert step == torch.tensor([vectors.double().square().mean().sqrt().item() * 0.9957]).bfloat16()
    # Codes of dimension 0: 3, 2, 1, 0; of dimension 1: 0, 2, 1, 3.
    assert packed.tolist() == [3 | 2 << 2 | 1 << 4 | 0 << 6, 0 | 2 << 2 | 1 << 4 | 3 << 6]
    assert torch.equal(
        CODES["sketch"].unpack(packed) * 2, torch.tensor([[3.0, -3.0], [1.0, 1.0], [-1.0, -1.0], [-3.0, 3.0]])
    )


def test_bytes_of_small_quarters() -> None:
    vectors = torch.tensor([[9.0, 9.0, 2.0, -2.0], [9.0, 9.0, 0.1, -0.1], [9.0, 9.0, 8.0, 1.0], [9.0, 9.0, 1.0, -8.0]])
    packed, steps = CODES["quarters"].pack(vectors)
    # 0.7 times the root of 8.02 / 4, and of 130 / 4: the first two dimensions do not count.
    assert steps.tolist() == [0.9921875, 3.984375]
    assert torch.equal(torch.cat([packed[:2], packed[4:6]]).view(torch.bfloat16), steps)
    assert packed[2:4].tolist() == [10 | 8 << 4, 5 | 7 << 4]
    assert packed[6:8].tolist() == [10 | 8 << 4, 8 | 5 << 4]
    assert CODES["quarters"].unpack(packed)[:, :2].eq(0).all()


@BOTH
@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([64, 96, 128]))
def test_an_element_is_off_by_half_a_step_and_every_word_is_finite(kind: str, seed: int, head_size: int) -> None:
    codes = CODES[kind]
    vectors = torch.randn(16, codes.vectors, head_size, generator=torch.Generator().manual_seed(seed)) + seed % 3 - 1
    packed, steps = codes.pack(vectors)
    assert packed.view(torch.bfloat16).isfinite().all()
    scaled = vectors / steps.float().repeat_interleave(codes.per_byte, dim=-1).unsqueeze(-1)
    error = (codes.unpack(packed) - scaled)[..., codes.dropped :]
    inside = scaled[..., codes.dropped :].abs() <= (codes.top + 1) / 2
    # If a word is not finite, the first vector's element of the second byte moves by a step.
    moved = torch.zeros_like(inside)
    moved[:, :: codes.per_byte, 1::2] = True
    assert (error.abs()[inside & ~moved] <= 0.5001).all()
    assert (error.abs()[inside & moved] <= 1.5001).all()


def test_a_word_that_would_not_be_finite_is_moved_by_a_step() -> None:
    vectors = torch.ones(4, 64)
    vectors[:, 2:4] = 100.0
    packed, _ = CODES["quarters"].pack(vectors)
    assert packed.view(torch.bfloat16).isfinite().all()
    assert CODES["quarters"].unpack(packed)[:, 2:4].tolist() == [[7.5, 6.5], [7.5, 7.5], [7.5, 6.5], [7.5, 7.5]]


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_a_rotation_keeps_products_and_spreads_outliers(head_size: int) -> None:
    a, b = torch.randn(2, 50, head_size, dtype=torch.float64)
    torch.testing.assert_close(rotate(a) @ rotate(b).T, a @ b.T)
    lone = torch.zeros(head_size, dtype=torch.float64)
    lone[3] = 1
    assert rotate(lone).abs().max() <= (head_size & -head_size) ** -0.5 + 1e-12
    torch.testing.assert_close(rotate_back(rotate(a)), a)
    constant = rotate(torch.ones(head_size, dtype=torch.float64))
    assert constant.abs().max() < 0.5 * head_size**0.5


@BOTH
@pytest.mark.parametrize(("num_kv_heads", "group_size", "head_size", "page_size"), SHAPES)
def test_scores_are_the_best_part_of_the_stored_keys(
    kind: str, num_kv_heads: int, group_size: int, head_size: int, page_size: int
) -> None:
    batch = batch_of(kind, num_kv_heads, head_size, page_size)
    query = torch.randn(len(CONTEXTS), num_kv_heads, group_size, head_size).bfloat16()
    scores = score_pages(query, batch.statistics, batch.block_table, batch.num_pages, 0.7)
    per_block = 64 // page_size
    turn = rotate if KINDS[kind].is_rotated else lambda x: x
    for request, pages in enumerate(batch.num_pages.tolist()):
        assert scores[request, :, pages:].eq(-torch.inf).all()
        for page in range(0, pages, 7):
            keys = batch.keys[request][page * page_size : (page + 1) * page_size].double()
            parts = keys.unflatten(0, (KINDS[kind].vectors, -1))
            block = int(batch.block_table[request, page // per_block])
            for head in range(num_kv_heads):
                wanted = turn(parts.mean(dim=1)[:, head])
                stored, _ = CODES[kind].pack(wanted.float())
                assert torch.equal(stored, batch.statistics.vectors[block, head, page % per_block])
                exact = (turn(query[request, head].double()) @ as_kept(kind, wanted.float()).T).max()
                assert abs(scores[request, head, page].double() - exact) <= exact.abs() * 2**-8 + 1e-3


@pytest.mark.parametrize(("num_kv_heads", "group_size", "head_size", "page_size"), SHAPES)
def test_compiled_and_reference_agree(num_kv_heads: int, group_size: int, head_size: int, page_size: int) -> None:
    batch = batch_of("quarters", num_kv_heads, head_size, page_size)
    compiled = [part.clone() for part in batch.statistics.parts]
    pages = torch.arange(int(batch.num_pages[0]))
    per_block = batch.statistics.pages_per_block
    where = batch.block_table[0, pages // per_block], pages % per_block
    reference.update_page_statistics(batch.paged_keys, batch.statistics, *where)
    for before, after in zip(compiled, batch.statistics.parts, strict=True):
        # Unwritten blocks hold garbage: their bits are compared.
        assert torch.equal(before.view(torch.uint8), after.contiguous().view(torch.uint8))
    query = torch.randn(len(CONTEXTS), num_kv_heads, group_size, head_size).bfloat16()
    arguments = query, batch.statistics, batch.block_table, batch.num_pages, 0.0
    ordinal = [
        torch.where(bits < 0, bits ^ 0x7FFF, bits)
        for bits in (
            scores.view(torch.int16).int()
            for scores in (score_pages(*arguments), score_reference.score_pages(*arguments))
        )
    ]
    assert (ordinal[0] - ordinal[1]).abs().max() <= 1


def test_a_lone_match_is_found_that_a_mean_hides() -> None:
    """One key of a page of 8 matches the query, the others are its opposite."""
    query = torch.randn(1, 1, 1, 128).bfloat16()
    keys = torch.randn(512, 128) * 3
    keys[96:104] = -query[0, 0] / 2
    keys[99] = 4 * query[0, 0]
    worse = {}
    for kind, statistics in (("quarters", "int4"), ("sketch", "int2"), ("mean_and_spread", "int8")):
        layout = StatisticsLayout(8, 128, statistics, kind=KINDS[kind])
        cache = torch.zeros(8, 1, 64 + layout.rows(64), 256).bfloat16()
        cache[:, 0, :64, :128] = keys.view(8, 64, 128)
        views = layout.views(cache[:, :, 64:], 64)
        pages = torch.arange(64)
        update_page_statistics(PagedTensor.from_rows(cache[:, :, :64, :128], 8), views, pages // 8, pages % 8)
        scores = score_pages(query, views, torch.arange(8)[None], torch.tensor([64]), 0.0)[0, 0]
        worse[kind] = int((scores > scores[12]).sum())
    assert worse["quarters"] == worse["sketch"] == 0
    assert worse["mean_and_spread"] > 0


def test_channels_that_stand_out_leave_four_bits_of_the_others() -> None:
    """A query that ignores the large channels still finds the page. With two bits this is not possible."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(4096, 128, generator=generator)
    query = torch.randn(64, 1, 1, 128, generator=generator)
    for row in range(64):
        keys[row * 64 + 17] += query[row, 0, 0] * 0.7
    keys[:, 5::16] *= 32
    query[..., 5::16] /= 32
    found = {}
    for kind, statistics in (("quarters", "int4"), ("sketch", "int2")):
        layout = StatisticsLayout(8, 128, statistics, kind=KINDS[kind])
        cache = torch.zeros(64, 1, 64 + layout.rows(64), 256).bfloat16()
        cache[:, 0, :64, :128] = keys.view(64, 64, 128)
        views = layout.views(cache[:, :, 64:], 64)
        pages = torch.arange(512)
        update_page_statistics(PagedTensor.from_rows(cache[:, :, :64, :128], 8), views, pages // 8, pages % 8)
        table = torch.arange(64).expand(64, -1)
        scores = score_pages(query.bfloat16(), views, table, torch.full((64,), 512), 0.0)[:, 0]
        best = scores.topk(8, dim=-1).indices
        found[kind] = int((best == (torch.arange(64) * 8 + 2)[:, None]).any(dim=1).sum())
    assert found["quarters"] >= 55
    assert found["sketch"] <= 30


def test_only_their_own_format_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"format: got 'int8', allowed for sketch: int2"):
        StatisticsLayout(8, 64, "int8", kind=KINDS["sketch"])
    with pytest.raises(ValueError, match=r"format: got 'int2', allowed for quarters: int4"):
        StatisticsLayout(8, 64, "int2", kind=KINDS["quarters"])
    with pytest.raises(ValueError, match=r"format: got 'int2', allowed for mean_and_spread: int8, fp8, bf16"):
        StatisticsLayout(8, 64, "int2")


def test_bytes_of_a_record() -> None:
    for head_size in (64, 128, 256):
        sketch = StatisticsLayout(8, head_size, "int2", kind=KINDS["sketch"])
        quarters = StatisticsLayout(8, head_size, "int4", kind=KINDS["quarters"])
        assert sketch.record_bytes == head_size + 2
        assert quarters.record_bytes == 2 * head_size
        assert sketch.memory_overhead == quarters.memory_overhead == 1 / 16
        assert sketch.unit_tokens == quarters.unit_tokens == 16
