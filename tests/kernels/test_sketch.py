"""Sketches of pages: packing, rotation, and scores against their formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_kernels.page_score import reference as score_reference
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_statistics import KINDS, StatisticsLayout, reference, update_page_statistics
from sparse_kernels.page_statistics.kinds.sketch import pack, rotate, unpack
from sparse_kernels.paging import PagedTensor
from support.paged import PagedBatch, make_batch

CONTEXTS = [1000, 8, 7, 505, 64, 72, 999]
SHAPES = [(1, 1, 64, 8), (2, 4, 64, 8), (1, 16, 128, 16), (2, 3, 96, 8), (1, 8, 256, 32)]


def batch_of(num_kv_heads: int, head_size: int, page_size: int) -> PagedBatch:
    return make_batch(CONTEXTS, num_kv_heads, head_size, page_size=page_size, statistics="int2", kind="sketch")


def test_bytes_of_a_small_example() -> None:
    vectors = torch.tensor([[3.0, -3.0], [1.0, 0.1], [-1.0, -0.1], [-3.0, 3.0]])
    packed, step = pack(vectors)
    assert step == torch.tensor(vectors.double().square().mean().sqrt().item() * 0.9957).bfloat16()
    # Codes of dimension 0: 3, 2, 1, 0; of dimension 1: 0, 2, 1, 3.
    assert packed.tolist() == [3 | 2 << 2 | 1 << 4 | 0 << 6, 0 | 2 << 2 | 1 << 4 | 3 << 6]
    assert torch.equal(
        unpack(packed).view(4, 2) * 2, torch.tensor([[3.0, -3.0], [1.0, 1.0], [-1.0, -1.0], [-3.0, 3.0]])
    )


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([64, 96, 128]))
def test_an_element_is_off_by_half_a_step_and_every_word_is_finite(seed: int, head_size: int) -> None:
    vectors = torch.randn(16, 4, head_size, generator=torch.Generator().manual_seed(seed)) + seed % 3 - 1
    packed, step = pack(vectors)
    assert packed.view(torch.bfloat16).isfinite().all()
    error = unpack(packed).unflatten(-1, (4, -1)) - vectors / step.float()[:, None, None]
    inside = (vectors / step.float()[:, None, None]).abs() <= 2
    # Where a word would not be finite, the first vector's element of the second byte moves by a step.
    moved = torch.zeros_like(inside)
    moved[:, 0, 1::2] = True
    assert (error.abs()[inside & ~moved] <= 0.5001).all()
    assert (error.abs()[inside & moved] <= 1.5001).all()


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_a_rotation_keeps_products_and_spreads_outliers(head_size: int) -> None:
    a, b = torch.randn(2, 50, head_size, dtype=torch.float64)
    torch.testing.assert_close(rotate(a) @ rotate(b).T, a @ b.T)
    lone = torch.zeros(head_size, dtype=torch.float64)
    lone[3] = 1
    assert rotate(lone).abs().max() <= (head_size & -head_size) ** -0.5 + 1e-12
    constant = rotate(torch.ones(head_size, dtype=torch.float64))
    assert constant.abs().max() < 0.5 * head_size**0.5


@pytest.mark.parametrize(("num_kv_heads", "group_size", "head_size", "page_size"), SHAPES)
def test_scores_are_the_best_quarter_of_the_stored_keys(
    num_kv_heads: int, group_size: int, head_size: int, page_size: int
) -> None:
    batch = batch_of(num_kv_heads, head_size, page_size)
    query = torch.randn(len(CONTEXTS), num_kv_heads, group_size, head_size).bfloat16()
    scores = score_pages(query, batch.statistics, batch.block_table, batch.num_pages, 0.7)
    per_block = 64 // page_size
    for request, pages in enumerate(batch.num_pages.tolist()):
        assert scores[request, :, pages:].eq(-torch.inf).all()
        for page in range(0, pages, 7):
            quarters = batch.keys[request][page * page_size : (page + 1) * page_size].double().unflatten(0, (4, -1))
            block = int(batch.block_table[request, page // per_block])
            for head in range(num_kv_heads):
                wanted = rotate(quarters.mean(dim=1)[:, head])
                stored, step = pack(wanted.float())
                assert torch.equal(stored, batch.statistics.vectors[block, head, page % per_block])
                kept = unpack(stored).view(4, -1).double() * step.double()
                exact = (rotate(query[request, head].double()) @ kept.T).max()
                assert abs(scores[request, head, page].double() - exact) <= exact.abs() * 2**-8 + 1e-3


@pytest.mark.parametrize(("num_kv_heads", "group_size", "head_size", "page_size"), SHAPES)
def test_compiled_and_reference_agree(num_kv_heads: int, group_size: int, head_size: int, page_size: int) -> None:
    batch = batch_of(num_kv_heads, head_size, page_size)
    compiled = [part.clone() for part in batch.statistics.parts]
    pages = torch.arange(int(batch.num_pages[0]))
    per_block = batch.statistics.pages_per_block
    where = batch.block_table[0, pages // per_block], pages % per_block
    reference.update_page_statistics(batch.paged_keys, batch.statistics, *where)
    for before, after in zip(compiled, batch.statistics.parts, strict=True):
        assert torch.equal(before, after)
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
    for kind, statistics in (("sketch", "int2"), ("mean_and_spread", "int8")):
        layout = StatisticsLayout(8, 128, statistics, kind=KINDS[kind])
        cache = torch.zeros(8, 1, 64 + layout.rows(64), 256).bfloat16()
        cache[:, 0, :64, :128] = keys.view(8, 64, 128)
        views = layout.views(cache[:, :, 64:], 64)
        pages = torch.arange(64)
        update_page_statistics(PagedTensor.from_rows(cache[:, :, :64, :128], 8), views, pages // 8, pages % 8)
        scores = score_pages(query, views, torch.arange(8)[None], torch.tensor([64]), 0.0)[0, 0]
        worse[kind] = int((scores > scores[12]).sum())
    assert worse["sketch"] == 0
    assert worse["mean_and_spread"] > 0


def test_only_two_bits_are_allowed_and_only_for_sketches() -> None:
    with pytest.raises(ValueError, match=r"format: got 'int8', allowed for sketch: int2"):
        StatisticsLayout(8, 64, "int8", kind=KINDS["sketch"])
    with pytest.raises(ValueError, match=r"format: got 'int2', allowed for mean_and_spread: int8, fp8, bf16"):
        StatisticsLayout(8, 64, "int2")


def test_a_sketch_takes_the_bytes_of_one_eight_bit_mean() -> None:
    for head_size in (64, 128, 256):
        sketch = StatisticsLayout(8, head_size, "int2", kind=KINDS["sketch"])
        assert sketch.record_bytes == head_size + 2
        assert sketch.memory_overhead == 1 / 16
