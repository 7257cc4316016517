"""Given pages and returned pages: `DecodeBatch.pages` and `DecodeOutput.pages`, in torch and on a CPU."""

from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection, Softmax
from sparse_kernels.group_routing import GroupRouting
from sparse_kernels.multi_token_decode import multi_token_decode
from sparse_kernels.page_lists import attended_pages, chosen_pages, with_next_pages
from sparse_kernels.page_score import score_pages
from sparse_kernels.page_topk import best_first, select_pages
from sparse_kernels.sparse_attention import attend_pages
from sparse_kernels.sparse_decode import sparse_decode
from sparse_kernels.split_attention import split_attention
from sparse_kernels.stopping import StopRule
from support.paged import PagedBatch, make_batch

SOFTMAX = Softmax(0.1)
HEADS, GROUP, SIZE, PAGE, K = 2, 4, 64, 8, 8
SELECTION = PageSelection(K, sink_pages=1, recent_pages=1, std_weight=0.75)
RAGGED = (700, 1, 7, 8, 63, 64, 65, 71, 72, 73, 1000)
"""Tokens of contexts: of 8 and 9 complete pages, more and fewer, each with and without an incomplete page."""
RULE = StopRule(scale_tolerance=100.0, direction_tolerance=3.0, patience=1, block_tokens=16)
"""Stops after the second test interval, which is four pages."""


class Step:
    """A decode step of ragged requests, with garbage in the rest of the cache."""

    def __init__(self, contexts: tuple[int, ...] = RAGGED, queries: int = 1, statistics: bool = True) -> None:
        self.paged: PagedBatch = make_batch(list(contexts), HEADS, SIZE)
        cache = self.paged.cache
        self.cache = cache if statistics else replace(cache, statistics=None)
        generator = torch.Generator().manual_seed(3)
        query = torch.randn(len(contexts) * queries, HEADS * GROUP, SIZE, generator=generator).bfloat16()
        self.batch = DecodeBatch(query, self.paged.block_table.int(), self.paged.context_lens.int())

    def room(self, k: int = K) -> DecodeOutput:
        """The output memory of a step, full of garbage."""
        pages = torch.full((self.batch.num_tokens, HEADS, k), 77, dtype=torch.int32)
        return replace(DecodeOutput.like(self.batch.query), pages=pages)

    def decode(self, selection: PageSelection = SELECTION, output: DecodeOutput | None = None, **changes: object):
        batch = {name: changes.pop(name) for name in list(changes) if name in DecodeBatch.__dataclass_fields__}
        return sparse_decode(
            replace(self.batch, **batch),
            changes.pop("cache", self.cache),
            changes.pop("softmax", SOFTMAX),
            selection,
            output=output,
            **changes,
        )

    def round_trip(self, selection: PageSelection = SELECTION, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of a step and its pages, which give the same output when they are fed to the step."""
        output = self.room(selection.k)
        heads = self.decode(selection, output, **changes)
        assert output.pages is not None
        assert torch.equal(heads, self.decode(selection, **changes))
        # Statistics do not matter any more.
        cache = replace(self.cache, statistics=None)
        assert torch.equal(heads, self.decode(selection, cache=cache, pages=output.pages, **changes))
        return heads, output.pages


def test_pages_that_a_step_chose_give_the_same_output():
    step = Step()
    _, pages = step.round_trip()
    whole = step.paged.num_pages <= K
    assert whole.tolist().count(True) == 7
    assert (pages[whole] == -1).all()
    assert (pages[~whole] >= 0).all()
    grouped = step.batch.query.unflatten(1, (HEADS, -1))
    scores = score_pages(grouped, step.paged.statistics, step.paged.block_table, step.paged.num_pages, 0.75)
    expected = select_pages(scores, step.paged.num_pages, K, 1, 1)
    assert torch.equal(pages[~whole].long(), expected[~whole])


def test_pages_follow_query_tokens():
    step = Step((700, 75, 64, 3), queries=3)
    _, pages = step.round_trip()
    lengths = step.batch.num_pages(PAGE)
    assert lengths.tolist() == [87, 87, 87, 9, 9, 9, 7, 7, 8, 0, 0, 0]
    assert torch.equal((pages >= 0).any(dim=-1), (lengths > K)[:, None].expand(-1, HEADS))


@pytest.mark.parametrize(
    "changes",
    [
        {"dense_tokens": 700},
        {"dense_requests": torch.arange(len(RAGGED)) % 2 == 0},
        {"budgets": torch.tensor([3, 8, 8, 2, 2, 8, 8, 4, 8, 9, 5]).int()},
        {"seq_lens": torch.tensor([700, 0, -1, *RAGGED[3:]]).int()},
        {"softmax": Softmax(0.1, 5.0, torch.linspace(-2, 3, HEADS * GROUP))},
        {"rule": RULE},
        {"rule": RULE, "budgets": torch.full((len(RAGGED),), 5).int()},
    ],
    ids=[
        "short contexts whole",
        "dense requests",
        "budgets",
        "padding",
        "sinks and softcap",
        "rule",
        "rule and budgets",
    ],
)
@pytest.mark.parametrize("statistics", [True, False])
def test_pages_go_with_what_else_a_step_has(changes, statistics):
    step = Step(statistics=statistics)
    heads, pages = step.round_trip(**changes)
    assert heads.isfinite().all()
    assert (pages >= 0).any()
    contexts = changes.get("seq_lens", step.batch.seq_lens)
    dense = (contexts <= changes.get("dense_tokens", 0)) | changes.get("dense_requests", torch.tensor(False))
    budgets = changes.get("budgets", torch.full_like(contexts, K)).clamp(max=K)
    read = torch.where(dense | (contexts // PAGE <= budgets), 0, budgets)
    assert torch.equal((pages >= 0).sum(dim=-1), read[:, None].expand(-1, HEADS).long())
    assert ((pages >= 0) == (torch.arange(K) < read[:, None, None])).all()


def test_with_a_rule_the_list_has_all_pages_in_reading_order():
    step = Step((700, 1000))
    output = replace(step.room(), pages_read=torch.zeros(2, HEADS, dtype=torch.int64))
    step.decode(output=output, rule=RULE)
    assert (output.pages_read == 4).all()
    grouped = step.batch.query.unflatten(1, (HEADS, -1))
    scores = score_pages(grouped, step.paged.statistics, step.paged.block_table, step.paged.num_pages, 0.75)
    chosen = select_pages(scores, step.paged.num_pages, K, 1, 1)
    assert torch.equal(output.pages.long(), best_first(chosen, scores, step.paged.num_pages, 1, 1))


def test_a_step_attends_exactly_the_pages_of_its_list():
    """Pages are read in the order of the list. Entries that are not complete pages of the context are ignored."""
    step = Step((700, 703, 704, 100))
    num_pages = step.paged.num_pages
    generator = torch.Generator().manual_seed(5)
    lists = torch.stack(
        [torch.stack([torch.randperm(int(n), generator=generator)[:K] for _ in range(HEADS)]) for n in num_pages]
    ).int()
    grouped = step.batch.query.unflatten(1, (HEADS, -1))
    expected = attend_pages(step.paged.tokens(grouped), step.cache, lists.long(), SOFTMAX)
    torch.testing.assert_close(step.decode(pages=lists), expected, atol=1e-2, rtol=1e-2)

    gaps = lists.clone()
    gaps[:, 0, 2], gaps[:, 1, 5:], gaps[1, 0, 0], gaps[2, 1, 3], gaps[3, 0, 7] = -1, -1, 87, 88, 2**31 - 1
    kept = torch.where((gaps >= 0) & (gaps < num_pages[:, None, None]), gaps, -1)
    expected = attend_pages(step.paged.tokens(grouped), step.cache, kept.long(), SOFTMAX)
    torch.testing.assert_close(step.decode(pages=gaps), expected, atol=1e-2, rtol=1e-2)
    # Places without a page change no bit.
    order = (kept < 0).int().argsort(dim=-1, stable=True)
    assert torch.equal(step.decode(pages=gaps), step.decode(pages=kept.gather(-1, order)))


def test_a_row_whose_list_is_empty_attends_the_incomplete_page():
    step = Step((704, 703))
    empty = torch.full((2, HEADS, K), -1, dtype=torch.int32)
    output = replace(
        DecodeOutput.like(step.batch.query), pages_read=torch.ones(2, HEADS).long(),
        counters=torch.zeros(HEADS, 4, dtype=torch.int64),
    )  # fmt: skip
    heads = step.decode(pages=empty, output=output, rule=RULE)
    assert torch.equal(heads, step.decode(pages=empty))
    assert (heads[0] == 0).all(), "nothing is attended"
    newest = step.paged.values[1][-7:].double()
    logits = torch.einsum(
        "hgd,nhd->hgn", step.batch.query[1].double().unflatten(0, (HEADS, -1)), step.paged.keys[1][-7:].double()
    )
    expected = torch.einsum("hgn,nhd->hgd", (logits * 0.1).softmax(dim=-1), newest).flatten(0, 1)
    torch.testing.assert_close(heads[1].double(), expected, atol=1e-2, rtol=1e-2)
    assert output.pages_read.tolist() == [[0] * HEADS] * 2
    assert output.counters.tolist() == [[1, 0, 7, 703]] * HEADS


def test_pages_outside_the_lists_are_not_read():
    """NaN in keys and values of other pages, in statistics and beyond the contexts changes no bit."""
    step = Step((700, 705, 71))
    heads, pages = step.round_trip()
    read = pages[:, :, :, None] == torch.arange(100)
    table, per_block = step.paged.block_table, step.cache.keys.pages_per_block
    for request, context in enumerate((700, 705)):
        for page in range(context // PAGE):
            block, within = table[request, page // per_block], page % per_block
            for head in range(HEADS):
                if not read[request, head, :, page].any():
                    step.cache.keys.view[block, head, within] = torch.nan
                    step.cache.values.view[block, head, within] = torch.nan
    step.paged.statistics.vectors.fill_(127)
    assert torch.equal(step.decode(pages=pages), heads)


def test_skipped_groups_have_no_pages():
    step = Step()
    coefficients = torch.zeros(HEADS, 4)
    coefficients[:, 0] = torch.tensor([-2.0, 2.0])  # the first KV head is always skipped
    heads, pages = step.round_trip(routing=GroupRouting(coefficients))
    assert (pages[:, 0] == -1).all()
    assert (pages[step.paged.num_pages > K, 1] >= 0).all()
    assert (heads.unflatten(1, (HEADS, -1))[step.paged.num_pages > 0, 0] == 0).all()


def test_parts_of_a_batch_have_their_lists():
    step = Step((700, 300, 1000), queries=2)
    _, pages = step.round_trip()
    part = replace(step.batch, pages=pages).requests(1, 3)
    assert torch.equal(part.pages, pages[2:])
    output = step.room()
    assert output.tokens(2, 4).pages.data_ptr() == output.pages[2:].data_ptr()
    alone = sparse_decode(part, step.cache, SOFTMAX, SELECTION)
    assert torch.equal(alone, step.decode(pages=pages)[2:])


def lists_of(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("pages", "got"),
    [
        (lists_of(2, HEADS, K, dtype=torch.int64), r"int64 \[2, 2, 8\]"),
        (lists_of(2, HEADS, K + 1), r"int32 \[2, 2, 9\]"),
        (lists_of(2, 1, K), r"int32 \[2, 1, 8\]"),
        (lists_of(3, HEADS, K), r"int32 \[3, 2, 8\]"),
        (lists_of(2, HEADS * K), r"int32 \[2, 16\]"),
        (lists_of(2, K, HEADS).transpose(1, 2), r"int32 \[2, 2, 8\] on cpu, not contiguous"),
    ],
)
def test_refuses_lists_that_do_not_fit(pages, got):
    step = Step((700, 300))
    with pytest.raises(ValueError, match=f"^pages: got {got}.*, allowed: " + r"int32 \[2, 2, 8\] on cpu, contiguous"):
        step.decode(pages=pages)
    with pytest.raises(ValueError, match=rf"^output.pages: got {got}"):
        step.decode(output=replace(step.room(), pages=pages))


def test_refuses_lists_where_they_have_no_meaning():
    step = Step((700, 300))
    pages = lists_of(2, HEADS, K)
    with pytest.raises(ValueError, match=r"output.pages: got room for pages, allowed: None where the batch has pages"):
        step.decode(pages=pages, output=step.room())
    for operation in (split_attention, multi_token_decode):
        for batch, output in ((replace(step.batch, pages=pages), None), (step.batch, step.room())):
            with pytest.raises(ValueError, match="pages: got lists of pages, allowed: None where every page is read"):
                operation(batch, step.cache, SOFTMAX, output=output)


def test_lists_serve_where_selection_and_attention_are_two_calls():
    """Lists between the calls change no bit, and equal those of a step."""
    step = Step()
    num_pages, grouped = step.paged.num_pages, step.batch.query.unflatten(1, (HEADS, -1))
    tokens = step.paged.tokens(grouped)
    scores = score_pages(grouped, step.paged.statistics, step.paged.block_table, num_pages, 0.75)
    selected = select_pages(scores, num_pages, K, 1, 1)
    lists = chosen_pages(selected, num_pages, K)
    output = step.room()
    step.decode(output=output)
    assert torch.equal(lists, output.pages)
    again = attended_pages(lists, num_pages, K)
    assert torch.equal(again, selected)
    expected = attend_pages(tokens, step.cache, selected, SOFTMAX)
    assert torch.equal(attend_pages(tokens, step.cache, again, SOFTMAX), expected)
    assert torch.equal(step.decode(pages=lists), expected)


def test_lists_of_selections_that_have_gaps_or_other_widths():
    num_pages = torch.tensor([20, 4, 20])
    wide = torch.tensor([[-1, 3, 9, -1, 1, 7], [0, 1, 2, 3, -1, -1], [-1, -1, -1, -1, -1, 5]])[:, None]
    lists = chosen_pages(wide, num_pages, 4)
    assert lists.dtype == torch.int32
    assert lists[:, 0].tolist() == [[3, 9, 1, 7], [-1] * 4, [5, -1, -1, -1]]
    assert chosen_pages(wide, num_pages, 8)[:, 0].tolist() == [[3, 9, 1, 7, -1, -1, -1, -1], [-1] * 8, [5] + [-1] * 7]
    by_row = torch.tensor([[2], [3], [9]])
    assert chosen_pages(wide, num_pages, 4, by_row)[:, 0].tolist() == [[3, 9, -1, -1], [0, 1, 2, -1], [5, -1, -1, -1]]
    listed = torch.tensor([[19, 20, -1, 0], [9, 9, 9, 9], [-7, 4, 4, 3]])[:, None].int()
    assert attended_pages(listed, num_pages, 4)[:, 0].tolist() == [[19, 0, -1, -1], [0, 1, 2, 3], [4, 4, 3, -1]]
    assert attended_pages(listed, num_pages, by_row)[:, 0].tolist() == [[19, -1, -1, -1], [-1] * 4, [4, 4, 3, -1]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_list_goes_on_with_the_pages_that_its_context_completes_next(dtype):
    pages = torch.tensor([[[2, 0], [1, -1]], [[5, 6], [0, 6]]], dtype=dtype)
    expected = [[[2, 0, 3, 4], [1, -1, 3, 4]], [[5, 6, 7, 8], [0, 6, 7, 8]]]
    num_pages = torch.tensor([3, 7])
    longer = with_next_pages(pages, num_pages, 2)
    assert (longer.tolist(), longer.dtype) == (expected, dtype)
    room = torch.full((3, 2, 4), -2, dtype=dtype)
    with_next_pages(pages, num_pages, 2, out=room[:2])
    assert room.tolist() == [*expected, [[-2] * 4] * 2]
    assert torch.equal(with_next_pages(pages, num_pages, 0), pages)
