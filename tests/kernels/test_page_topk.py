import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_kernels.page_topk import reference, select_pages


def expected(scores: torch.Tensor, length: int, k: int, sink_pages: int, recent_pages: int) -> list[int]:
    """Sorts one row in plain Python, with stable ties."""

    def rank(page: int) -> tuple[bool, float, int]:
        score = float(scores[page])
        always = page < sink_pages or page >= length - recent_pages
        return (not always, torch.inf if score != score else -score, page)

    best = sorted(sorted(range(length), key=rank)[:k])
    return best + [-1] * (k - len(best))


special = st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, 1.0078125, -1.0, 3e38, 1e-40])


@given(
    rows=st.lists(st.lists(special | st.floats(width=16), min_size=0, max_size=40), min_size=1, max_size=3),
    k=st.integers(1, 20),
    sink_pages=st.integers(0, 3),
    recent_pages=st.integers(0, 3),
)
@settings(max_examples=300, deadline=None)
def test_exact_with_ties_to_the_lowest_page(rows, k, sink_pages, recent_pages):
    k = max(k, sink_pages + recent_pages)
    width = max(len(row) for row in rows)
    num_pages = torch.tensor([len(row) for row in rows])
    # Scores beyond a row's own pages must not matter, even if they are the largest.
    scores = torch.full((len(rows), 1, width), torch.inf, dtype=torch.bfloat16)
    for index, row in enumerate(rows):
        scores[index, 0, : len(row)] = torch.tensor(row, dtype=torch.bfloat16)
    for select in (select_pages, reference.select_pages):
        pages = select(scores, num_pages, k, sink_pages, recent_pages)
        assert pages.shape == (len(rows), 1, k)
        for index, row in enumerate(rows):
            assert pages[index, 0].tolist() == expected(scores[index, 0], len(row), k, sink_pages, recent_pages)


@pytest.mark.parametrize("pages", [63, 64, 65, 2048, 65_537])
def test_compiled_equals_reference(pages):
    generator = torch.Generator().manual_seed(pages)
    scores = torch.randn(3, 2, pages, generator=generator).bfloat16()
    num_pages = torch.tensor([pages, max(pages - 1, 0), 1])
    assert torch.equal(select_pages(scores, num_pages, 64, 1), reference.select_pages(scores, num_pages, 64, 1, 0))


def test_all_equal_scores_select_the_lowest_pages():
    scores = torch.full((1, 1, 500), -2.5, dtype=torch.bfloat16)
    assert select_pages(scores, torch.tensor([500]), 64, 1)[0, 0].tolist() == list(range(64))


def test_only_sinks():
    scores = torch.randn(1, 1, 10).bfloat16()
    assert select_pages(scores, torch.tensor([10]), 2, 2)[0, 0].tolist() == [0, 1]


def test_bad_arguments_are_refused():
    scores = torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match=r"scores: got torch.float32, allowed: torch.bfloat16"):
        select_pages(scores, torch.tensor([8]), 4, 1)
    with pytest.raises(ValueError, match="k: got 2, allowed: at least 3"):
        select_pages(scores.bfloat16(), torch.tensor([8]), 2, 3)


@pytest.mark.parametrize(
    ("lengths", "sentence"),
    [
        ([30], "num_pages: got 30, allowed: up to the 16 pages scored"),
        ([3, 4], r"num_pages: got \[2\], allowed: one for each of 1 tokens"),
    ],
)
def test_lengths_that_do_not_fit_the_scores_are_refused(lengths, sentence):
    with pytest.raises(ValueError, match=sentence):
        select_pages(torch.zeros(1, 2, 16).bfloat16(), torch.tensor(lengths), 4)
