"""Scores in two levels: which pages are refined, and what the others have."""

import math

import pytest
import torch
from sparse_kernels.batch import PageSelection
from sparse_kernels.page_score import reference, score_pages
from sparse_kernels.page_score.levels import FLAT_PAGES, LEAST_OF_STRIPE, STRIPES, in_units, refined_pages
from sparse_kernels.page_statistics import KINDS
from support.paged import PagedBatch, make_batch

KIND = KINDS["leveled_quarters"]


def rank(score: float) -> float:
    return -math.inf if score != score else score + 0.0


def expected(scores: list[float], pages_per_block: int, share: float) -> list[bool]:
    """The rule in plain Python."""
    if len(scores) <= FLAT_PAGES:
        return [True] * len(scores)
    kept = [False] * len(scores)
    for stripe in range(STRIPES):
        pages = [page for page in range(len(scores)) if page // pages_per_block % STRIPES == stripe]
        count = max(math.ceil(len(pages) * math.ceil(share * 1024) / 1024), LEAST_OF_STRIPE)
        best = sorted((rank(scores[page]) for page in pages), reverse=True)[:count]
        for page in pages:
            kept[page] = rank(scores[page]) >= best[-1]
    return kept


@pytest.mark.parametrize("share", [0.001, 0.25, 0.3, 1.0])
@pytest.mark.parametrize("pages_per_block", [1, 2, 8, 32, 96])
@pytest.mark.parametrize("num_pages", [2047, 2048, 2049, 4097, 5000])
def test_the_best_of_each_stripe_are_refined(num_pages: int, pages_per_block: int, share: float) -> None:
    generator = torch.Generator().manual_seed(num_pages)
    # Few different scores, so that many are equal at the border.
    first = torch.randint(-9, 9, (2, num_pages), generator=generator).bfloat16() * 0.5
    first[1] = torch.randn(num_pages, generator=generator).bfloat16()
    first[1, ::50], first[1, 3::70], first[1, 5::90] = torch.nan, -0.0, torch.inf
    found = refined_pages(first, pages_per_block, share)
    for head in range(2):
        assert found[head].tolist() == expected(first[head].tolist(), pages_per_block, share)
    assert found.all() == (num_pages <= FLAT_PAGES or share == 1)


def test_a_long_row_has_as_many_refined_pages_as_one_thread_block_selects() -> None:
    first = torch.randn(1, FLAT_PAGES + 1).bfloat16()
    assert refined_pages(first, 8, 0.001).sum() >= STRIPES * LEAST_OF_STRIPE == 1024


@pytest.mark.parametrize(("share", "units"), [(1.0, 1024), (0.25, 256), (0.1, 103), (1e-9, 1)])
def test_a_share_in_units(share: float, units: int) -> None:
    assert in_units(share) == units


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, math.nan])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    message = f"refined: got {share}, allowed: above 0, at most 1"
    with pytest.raises(ValueError, match=message):
        in_units(share)
    with pytest.raises(ValueError, match=message):
        PageSelection(1, refined=share).check()


def long_batch(num_kv_heads: int = 2, head_size: int = 64, block_size: int = 64) -> PagedBatch:
    contexts = [8 * 2047 + 7, 8 * 2048, 8 * 2049, 8 * 2600 + 1, 5, 77]
    return make_batch(contexts, num_kv_heads, head_size, block_size, statistics="int4", kind=KIND.name)


@pytest.mark.parametrize("group_size", [1, 3, 16])
@pytest.mark.parametrize("block_size", [16, 64])
def test_pages_that_are_not_refined_have_no_score(block_size: int, group_size: int) -> None:
    batch = long_batch(block_size=block_size)
    query = torch.randn(6, 2, group_size, 64).bfloat16()
    arguments = query, batch.statistics, batch.block_table, batch.num_pages, 0.0
    whole, leveled = score_pages(*arguments), score_pages(*arguments, refined=0.25)
    for request, pages in enumerate(batch.num_pages.tolist()):
        blocks = batch.block_table[request, : -(-pages // (block_size // 8))]
        vectors, scales, _ = batch.statistics.records(blocks)
        means = vectors[:, :pages, 0] * scales[:, :pages, 0, None]
        first = torch.einsum("hgd,hpd->hgp", query[request].float(), means).amax(dim=1)
        kept = leveled[request, :, :pages] > -torch.inf
        assert torch.equal(leveled[request, :, :pages][kept], whole[request, :, :pages][kept])
        assert leveled[request, :, pages:].eq(-torch.inf).all()
        assert kept.all() == (pages <= FLAT_PAGES)
        if pages <= FLAT_PAGES:
            continue
        wanted = refined_pages(first.bfloat16(), block_size // 8, 0.25)
        # Of two pages with nearly equal first scores, either may be refined.
        assert (wanted != kept).sum() <= 0.01 * kept.sum()
        assert (whole[request, :, :pages].argmax(dim=-1)[:, None] == kept.nonzero()[:, 1]).any()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    batch = long_batch()
    query = torch.randn(6, 2, 4, 64).bfloat16()
    together = score_pages(query, batch.statistics, batch.block_table, batch.num_pages, 0.0, 0.25)
    for request, pages in enumerate(batch.num_pages.tolist()):
        row = slice(request, request + 1)
        alone = score_pages(query[row], batch.statistics, batch.block_table[row], batch.num_pages[row], 0.0, 0.25)
        assert torch.equal(alone[0], together[request, :, :pages])


def test_other_kinds_ignore_the_share() -> None:
    batch = make_batch([8 * 2100], 1, 64)
    query = torch.randn(1, 1, 2, 64).bfloat16()
    arguments = query, batch.statistics, batch.block_table, batch.num_pages, 0.0
    assert torch.equal(score_pages(*arguments, refined=0.25), score_pages(*arguments))
    assert torch.equal(reference.score_pages(*arguments, 0.25), reference.score_pages(*arguments))
