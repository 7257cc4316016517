"""Records of quarters in two levels: their bytes, their places, and what they give back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_statistics import KINDS, StatisticsLayout, reference
from support.paged import PagedBatch, make_batch

KIND = KINDS["leveled_quarters"]
CODES = KIND.codes
CONTEXTS = [1000, 8, 7, 505, 64, 72, 999]
SHAPES = [(2, 4, 64, 8), (2, 1, 96, 16), (1, 7, 240, 32)]
"""Each is compiled."""


def batch_of(num_kv_heads: int, head_size: int, page_size: int) -> PagedBatch:
    return make_batch(CONTEXTS, num_kv_heads, head_size, page_size=page_size, statistics="int4", kind=KIND.name)


def as_kept(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors `[..., 4, head_size]` float32 after storing and reading, float64."""
    packed, steps = CODES.pack(vectors)
    return CODES.unpack(packed).double() * steps.double().unsqueeze(-1)


def test_bytes_of_a_small_record() -> None:
    stored = torch.tensor([[2.0, -2.0, 2.0, -2.0], [0.1, -0.1, 0.1, -0.1], [8.0, 1.0, -1.0, -8.0], [0.0] * 4])
    packed, steps = CODES.pack(torch.cat([torch.full((4, 4), 9.0), stored], dim=1))
    # 0.7 times the root of the mean square: the first four dimensions do not count.
    assert steps.tolist() == [1.3984375, 0.06982421875, 3.984375, 0.0]
    rows = packed.unflatten(-1, (4, 4))
    assert torch.equal(rows[:, :2].contiguous().view(torch.bfloat16)[:, 0], steps)
    assert rows[:, 2:].tolist() == [[9 | 6 << 4] * 2, [9 | 6 << 4] * 2, [10 | 8 << 4, 7 | 5 << 4], [8 | 8 << 4] * 2]
    assert CODES.unpack(packed)[:, :4].eq(0).all()
    assert CODES.unpack(packed)[:3, 4:].tolist() == [[1.5, -1.5] * 2, [1.5, -1.5] * 2, [2.5, 0.5, -0.5, -2.5]]


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([64, 80, 96, 128]))
def test_an_element_is_off_by_half_a_step_and_every_word_is_finite(seed: int, head_size: int) -> None:
    vectors = torch.randn(16, 4, head_size, generator=torch.Generator().manual_seed(seed)) + seed % 3 - 1
    packed, steps = CODES.pack(vectors)
    assert packed.view(torch.bfloat16).isfinite().all()
    scaled = vectors / steps.float().unsqueeze(-1)
    error = (CODES.unpack(packed) - scaled)[..., CODES.dropped :]
    inside = scaled[..., CODES.dropped :].abs() <= (CODES.top + 1) / 2
    # If a word is not finite, the first element of its second byte moves by a step.
    moved = torch.zeros_like(inside)
    moved[..., 2::4] = True
    assert (error.abs()[inside & ~moved] <= 0.5001).all()
    assert (error.abs()[inside & moved] <= 1.5001).all()


def test_a_word_that_would_not_be_finite_is_moved_by_a_step() -> None:
    vectors = torch.zeros(4, 128)
    vectors[:, 4:8] = 100.0
    packed, _ = CODES.pack(vectors)
    assert packed.view(torch.bfloat16).isfinite().all()
    assert CODES.unpack(packed)[:, 4:8].tolist() == [[7.5, 7.5, 6.5, 7.5]] * 4


@pytest.mark.parametrize("page_size", [4, 8, 16, 32])
def test_a_record_gives_back_the_quarters(page_size: int) -> None:
    keys, query = torch.randn(50, page_size, 64).double(), torch.randn(3, 64).double()
    quarters = keys.unflatten(1, (4, -1)).mean(dim=2)
    vectors, spread = KIND.summarise(keys)
    torch.testing.assert_close(KIND.summary(vectors, spread)[0], quarters)
    products = torch.einsum("gd,pvd->gpv", query, vectors)
    torch.testing.assert_close(KIND.combine(products), torch.einsum("gd,pqd->gpq", query, quarters).amax(dim=-1))
    torch.testing.assert_close(KIND.first_score(products[..., 0]), torch.einsum("gd,pd->gp", query, keys.mean(dim=1)))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_keys_that_are_not_finite_do_not_hide_a_page(poison: float) -> None:
    keys = torch.randn(6, 8, 64, generator=torch.Generator().manual_seed(1))
    keys[:, 3, 7], keys[:, 4, 9] = poison, -poison
    packed, steps = CODES.pack(reference.summarise(KIND, keys)[0])
    assert packed.view(torch.bfloat16).isfinite().all()
    products = torch.einsum("gd,pvd->gpv", torch.randn(8, 64), CODES.unpack(packed)) * steps.float()
    for scores in (KIND.first_score(products[..., 0]), KIND.combine(products)):
        assert (scores > 2.0**100).all()


def test_the_first_vectors_of_a_block_come_first() -> None:
    layout = StatisticsLayout(8, 128, "int4", kind=KIND)
    views = layout.views(torch.zeros(2, 3, layout.rows(64), 256).bfloat16(), 64)
    assert views.vectors.shape == (2, 3, 8, 4, 64)
    assert views.vectors.stride()[2:] == (64, 8 * 64, 1)
    assert views.vectors.data_ptr() == views.scales.data_ptr()
    assert views.row_stride == 512
    assert (views.head_size, views.vector_bytes) == (128, 256)


def test_bytes_of_a_record_are_those_of_quarters() -> None:
    for head_size in (32, 64, 80, 128, 256):
        mine, quarters = (StatisticsLayout(8, head_size, "int4", kind=kind) for kind in (KIND, KINDS["quarters"]))
        assert mine.record_bytes == quarters.record_bytes == 2 * head_size
        assert mine.unit_tokens == quarters.unit_tokens
        assert mine.memory_overhead == quarters.memory_overhead


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
            keys = batch.keys[request][page * page_size : (page + 1) * page_size]
            block = int(batch.block_table[request, page // per_block])
            for head in range(num_kv_heads):
                vectors, _ = reference.summarise(KIND, keys[:, head])
                stored, _ = CODES.pack(vectors)
                assert torch.equal(stored, batch.statistics.vectors[block, head, page % per_block].flatten())
                quarters = KIND.summary(as_kept(vectors), None)[0]
                exact = (query[request, head].double() @ quarters.T).max()
                assert abs(scores[request, head, page].double() - exact) <= exact.abs() * 2**-8 + 1e-3


def test_a_lone_match_is_found_that_a_mean_hides() -> None:
    """One key of a page of 8 matches the query, the others are its opposite."""
    query = torch.randn(1, 1, 1, 128).bfloat16()
    keys = torch.randn(64, 8, 128) * 3
    keys[12] = -query[0, 0] / 2
    keys[12, 3] = 4 * query[0, 0]
    vectors, _ = reference.summarise(KIND, keys)
    products = torch.einsum("d,pvd->pv", query[0, 0, 0].double(), as_kept(vectors))
    assert KIND.combine(products).argmax() == 12
    assert KIND.first_score(products[:, 0]).argmax() != 12
