"""Selection and lists of pages on CUDA, against the torch reference, on a GPU."""

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, PageSelection
from sparse_kernels.page_topk.reference import select_pages as reference_selection
from support.cuda import ON_GPU

pytestmark = ON_GPU


@pytest.mark.parametrize("segment", [None, 2048])
@pytest.mark.parametrize("pages", [5000, 70000])
@pytest.mark.parametrize("always", [(0, 0), (3, 2)])
def test_selection_by_budgets_is_exact(pages: int, always: tuple[int, int], segment: int | None) -> None:
    from sparse_kernels.page_topk.cuda import list_pages, select_pages

    torch.manual_seed(pages)
    budgets = torch.tensor([64, 1024, 5, 300, 7, 64], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([pages, pages - 3, pages, 299, 5, 64], device="cuda")
    scores = (torch.randn(6, 2, -(-pages // 8) * 8, device="cuda") * 4).round().bfloat16()
    expected = reference_selection(scores, lengths, 1024, *always, budgets.long()[:, None].expand(-1, 2))
    actual, counts = select_pages(scores, lengths, 1024, *always, segment=segment, budgets=budgets)
    assert torch.equal(actual.long().sort(dim=-1).values, expected.sort(dim=-1).values)
    assert torch.equal(counts, lengths.minimum(budgets).int()[:, None].expand(-1, 2))
    # They are best first, as with one number for all rows.
    alone, _ = select_pages(scores, lengths, 64, *always, segment=segment)
    assert torch.equal(alone[0], actual[0, :, :64])
    batch = DecodeBatch(
        scores[:, :, :8], torch.zeros(6, 1).int().cuda(), (lengths * 8 + 7).int(), budgets=budgets
    )  # fmt: skip
    listed = list_pages(scores, batch, 8, PageSelection(1024, *always))
    for row, budget in enumerate(budgets.tolist()):
        assert torch.equal(listed[row, :, :budget].long(), expected[row, :, :budget])


SCORES = {
    "distinct": lambda scores: scores,
    "equal": lambda scores: torch.full_like(scores, 1.5),
    "coarse": lambda scores: (scores.float() * 2).round().bfloat16(),
    "rising": lambda scores: scores.sort(dim=-1).values,
    "NaN and -inf": lambda scores: torch.where(scores.abs() < 0.3, torch.nan, scores).masked_fill(
        scores > 1, -torch.inf
    ),
    "all -inf": lambda scores: torch.full_like(scores, -torch.inf),
}


@pytest.mark.parametrize("kind", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize(("rows", "pages"), [(8, 1024), (3, 5000), (2, 70000), (2, 131072), (5, 64), (5, 63), (2, 9)])
@pytest.mark.parametrize("always", [(0, 0), (1, 1), (3, 2)])
def test_selection_is_exact(kind: object, rows: int, pages: int, always: tuple[int, int]) -> None:
    from sparse_kernels.page_topk.cuda import select_pages

    torch.manual_seed(rows + pages)
    scores = kind(torch.randn(rows, 2, pages, device="cuda").bfloat16())
    lengths = torch.randint(0, pages + 1, (rows,), device="cuda")
    lengths[0] = pages
    expected = reference_selection(scores, lengths, 64, *always)
    in_order, _ = select_pages(scores, lengths, 64, *always)
    for segment in (None, 1024):
        actual, counts = select_pages(scores, lengths, 64, *always, segment=segment)
        assert torch.equal(actual, in_order)
        assert torch.equal(actual.long().sort(dim=-1).values, expected.sort(dim=-1).values)
        assert torch.equal(counts, lengths.clamp(max=64).int()[:, None].expand(-1, 2))


@pytest.mark.parametrize("kind", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize(("k", "pages"), [(1025, 5000), (2048, 70000), (8192, 200000), (64, 66000), (5, 9)])
@pytest.mark.parametrize("always", [(0, 0), (3, 2)])
def test_lists_are_exact_whatever_the_launch(kind: object, k: int, pages: int, always: tuple[int, int]) -> None:
    from sparse_kernels.page_topk import select_pages
    from sparse_kernels.page_topk.cuda import list_pages

    torch.manual_seed(k + pages)
    scores = kind(torch.randn(5, 2, -(-pages // 8) * 8, device="cuda").bfloat16())
    lengths = torch.tensor([pages, k + 1, k, k - 1, pages - 3], device="cuda")
    # Scores beyond a row are garbage.
    beyond = torch.arange(scores.shape[2], device="cuda") >= lengths[:, None, None]
    scores = scores.masked_fill(beyond, torch.inf)
    expected = reference_selection(scores, lengths, k, *always)
    batch = DecodeBatch(scores[:, :, :8], torch.zeros(5, 1).int().cuda(), (lengths * 8 + 7).int())
    selection = PageSelection(k, *always)
    clusters = [1] if torch.cuda.get_device_capability() < (9, 0) else [1, 2, 4, 8]
    for cluster in clusters:
        assert torch.equal(list_pages(scores, batch, 8, selection, cluster=cluster).long(), expected)
    if k > 1024:
        assert torch.equal(select_pages(scores, lengths, k, *always).long(), expected)
