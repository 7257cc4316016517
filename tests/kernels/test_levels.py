"""Scores in two levels: which pages are refined, and what the others have."""

import math
import re
from pathlib import Path

import pytest
import sparse_kernels
import torch
from sparse_kernels.batch import DecodeBatch, PageSelection
from sparse_kernels.page_score import levels, reference, score_pages
from sparse_kernels.page_score.levels import FLAT_PAGES, LEAST_OF_STRIPE, STRIPES, in_units, refined_pages
from sparse_kernels.page_statistics import KINDS
from support.levels import exact_scores
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


def test_the_decode_kernel_has_the_same_rule() -> None:
    source = (Path(sparse_kernels.__file__).parent / "cuda" / "levels.cuh").read_text(encoding="utf-8")
    for name in ("STRIPES", "FLAT_PAGES", "LEAST_OF_STRIPE", "SHARE_UNITS"):
        assert re.findall(rf"\b{name} = (\d+)", source) == [str(getattr(levels, name))]


def long_batch(num_kv_heads: int = 2, head_size: int = 64, block_size: int = 64) -> PagedBatch:
    contexts = [8 * 2047 + 7, 8 * 2048, 8 * 2049, 8 * 2600 + 1, 5, 77]
    return make_batch(contexts, num_kv_heads, head_size, block_size, statistics="int4", kind=KIND.name)


@pytest.mark.parametrize(("block_size", "group_size", "head_size"), [(16, 4, 64), (64, 1, 96)])
def test_pages_that_are_not_refined_have_no_score(block_size: int, group_size: int, head_size: int) -> None:
    batch = long_batch(head_size=head_size, block_size=block_size)
    query = torch.randn(6, 2, group_size, head_size).bfloat16()
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
    query = torch.randn(1, 1, 4, 64).bfloat16()
    arguments = query, batch.statistics, batch.block_table, batch.num_pages, 0.0
    assert torch.equal(score_pages(*arguments, refined=0.25), score_pages(*arguments))
    assert torch.equal(reference.score_pages(*arguments, 0.25), reference.score_pages(*arguments))


def unwritten(width: int) -> torch.Tensor:
    """What rows of scores hold before: different numbers, so that none of them may matter."""
    return (torch.arange(width) % 97).bfloat16()


def triton_scores(
    batch: PagedBatch, query: torch.Tensor, refined: float, lengths: torch.Tensor, page_size: int = 0, skipped=None
) -> torch.Tensor:
    from sparse_kernels.page_score.cuda import launch_scores

    width = batch.block_table.shape[1] * batch.statistics.pages_per_block
    scores = unwritten(width).repeat(len(query), query.shape[1], 1)
    # A slice of a wider tensor, as vLLM's query is.
    wide = torch.cat([query.flatten(1, 2), torch.full_like(query[:, 0], torch.nan)], dim=1)
    requests = DecodeBatch(wide[:, : query.shape[1] * query.shape[2]], batch.block_table.int(), lengths.int())
    launch_scores(requests, batch.statistics, page_size, 0.0, scores, skipped, refined=refined)
    return scores


def first_scores(monkeypatch: pytest.MonkeyPatch, *arguments) -> torch.Tensor:
    """What the first launch leaves for the second."""
    from sparse_kernels.page_score import leveled_triton

    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    with monkeypatch.context() as patched:
        patched.setattr(leveled_triton, "_refine", Nothing())
        return triton_scores(*arguments)


def assert_unwritten(scores: torch.Tensor, row: int, pages: int) -> None:
    expected = unwritten(scores.shape[2])[pages:].expand(scores.shape[1], -1)
    assert torch.equal(scores[row, :, pages:], expected), "written beyond a row's pages"


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """One step of bfloat16, and the rounding of a query to 16-bit fixed point."""
    expected = expected.float()
    allowed = 2**-7 * expected.abs() + 2**-11 * expected.abs().max()
    assert ((actual.float() - expected).abs() <= allowed).all()


def shrink_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an eighth of the stripes and of the pages of a flat row, for fewer steps of the interpreter."""
    import triton.language as tl
    from sparse_kernels.page_score import leveled_triton

    for name, value in (("STRIPES", STRIPES // 8), ("FLAT_PAGES", FLAT_PAGES // 8)):
        for module in (levels, leveled_triton):
            monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(leveled_triton, f"_{name}", tl.constexpr(value))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("pages", "num_kv_heads", "group_size", "head_size", "block_size"),
    [
        ((2049, 0, 9), 1, 1, 64, 64),
        ((325,), 2, 2, 64, 16),
        ((257,), 1, 16, 80, 768),
        ((375,), 1, 3, 96, 256),
        ((288,), 1, 1, 128, 64),
    ],
)
def test_triton_refines_what_the_rule_says(
    monkeypatch, pages: tuple[int, ...], num_kv_heads: int, group_size: int, head_size: int, block_size: int
) -> None:
    from sparse_kernels.page_score import leveled_triton, triton

    for module in (leveled_triton, triton):
        monkeypatch.setattr(module, "PAGES", 128)
    if max(pages) <= FLAT_PAGES:
        shrink_rows(monkeypatch)
    contexts = [8 * count + 5 for count in pages]
    batch = make_batch(contexts, num_kv_heads, head_size, block_size, statistics="int4", kind=KIND.name)
    query = torch.randn(len(pages), num_kv_heads, group_size, head_size).bfloat16()
    leveled = triton_scores(batch, query, 0.25, batch.num_pages)
    first = first_scores(monkeypatch, batch, query, 0.25, batch.num_pages)
    expected = reference.score_pages(query, batch.statistics, batch.block_table, batch.num_pages, 0.0)
    for request, count in enumerate(pages):
        assert_unwritten(leveled, request, count)
        kept = torch.ones(num_kv_heads, count, dtype=torch.bool)
        if count > levels.FLAT_PAGES:
            kept = refined_pages(first[request, :, :count], block_size // 8, 0.25)
            assert kept.float().mean() < 0.6
            blocks = batch.block_table[request, : -(-count // (block_size // 8))]
            vectors, scales, _ = batch.statistics.records(blocks)
            means = vectors[:, :count, 0] * scales[:, :count, 0, None]
            assert_close(
                first[request, :, :count],
                torch.einsum("hgd,hpd->hgp", query[request].float(), means).amax(dim=1),
            )
        if count:
            of_means, of_records = exact_scores(query[request], batch, request)
            assert torch.equal(leveled[request, :, :count], of_records.masked_fill(~kept, -torch.inf))
            assert count <= levels.FLAT_PAGES or torch.equal(first[request, :, :count], of_means)
        assert torch.equal(leveled[request, :, :count] > -torch.inf, kept)
        if count:
            assert_close(leveled[request, :, :count][kept], expected[request, :, :count][kept])


@pytest.mark.usefixtures("interpreted")
def test_triton_refines_all_that_are_equal_at_the_border(monkeypatch) -> None:
    shrink_rows(monkeypatch)
    batch = make_batch([8 * 257], 1, 64, statistics="int4", kind=KIND.name)
    # All pages of the batch get the record of one page.
    batch.statistics.vectors.copy_(batch.statistics.vectors[batch.block_table[0, 0], :, :1].clone())
    scores = triton_scores(batch, torch.randn(1, 1, 1, 64).bfloat16(), 0.25, batch.num_pages)
    assert scores[0, 0, :257].unique().numel() == 1
    assert scores[0, 0, 0] > -torch.inf


@pytest.mark.usefixtures("interpreted")
def test_triton_finds_the_pages_of_several_query_tokens(monkeypatch) -> None:
    shrink_rows(monkeypatch)
    batch = make_batch([8 * 257, 17], 1, 64, statistics="int4", kind=KIND.name)
    query = torch.randn(4, 1, 1, 64).bfloat16()
    lengths = torch.tensor([256, 257, 2, 2])
    table = batch.block_table.repeat_interleave(2, dim=0)
    actual = triton_scores(batch, query, 0.25, batch.context_lens, page_size=8)
    expected = reference.score_pages(query, batch.statistics, table, lengths, 0.0)
    for token, pages in enumerate(lengths.tolist()):
        kept = actual[token, :, :pages] > -torch.inf
        assert kept.all() == (pages <= levels.FLAT_PAGES)
        assert_close(actual[token, :, :pages][kept], expected[token, :, :pages][kept])
        assert_unwritten(actual, token, pages)


@pytest.mark.usefixtures("interpreted")
def test_triton_scores_no_group_that_is_skipped(monkeypatch) -> None:
    from sparse_kernels.page_score import leveled_triton, triton

    shrink_rows(monkeypatch)
    batch = make_batch([8 * 257], 2, 64, statistics="int4", kind=KIND.name)
    query = torch.randn(1, 2, 1, 64).bfloat16()
    every = triton_scores(batch, query, 0.25, batch.num_pages)
    # Few programs, each with several runs and reads of keys.
    monkeypatch.setattr(triton, "_PROGRAMS", 1)
    monkeypatch.setattr(leveled_triton, "_KEYS", 64)
    skipped = torch.tensor([[0, 1]], dtype=torch.uint8)
    some = triton_scores(batch, query, 0.25, batch.num_pages, skipped=skipped)
    assert torch.equal(some, torch.where(skipped.bool()[..., None], unwritten(every.shape[2]), every))
