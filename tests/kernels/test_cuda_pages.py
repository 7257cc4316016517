"""Given pages and returned pages on CUDA: `DecodeBatch.pages` and `DecodeOutput.pages`, on a GPU."""

from copy import copy
from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import DecodeBatch, DecodeOutput, PageSelection
from sparse_kernels.page_lists import attended_pages
from sparse_kernels.sparse_decode import sparse_decode
from sparse_kernels.sparse_decode.reference import sparse_decode as reference_decode
from sparse_kernels.stopping import StopRule
from support.cuda import BEYOND, CASES, LONG, ON_GPU, Case, Inputs, assert_close, launches, stopping_inputs

pytestmark = ON_GPU

RULE = StopRule(scale_tolerance=0.3, direction_tolerance=0.03, patience=2, block_tokens=64)
EAGER = RULE._replace(scale_tolerance=1000.0, direction_tolerance=16.0, least_pages=30)
"""Every row that may stop stops after about 30 pages."""
DECODE = CASES | {
    "boundaries of 64 pages, group of 1": Case((511, 512, 513, 519, 520, 521, 527, 528, 1024), group=1),
    "boundaries of 64 pages, group of 16": Case((511, 512, 513, 519, 520, 521, 527, 528, 1024), group=16),
    "boundaries of 1,024 pages": Case((8191, 8192, 8193, 8199, 8200, 8201, 20000), k=1024),
    "many requests": Case((3000, 517, 1, 4096, 700) * 30),
    "group of 5, pages of 32, small blocks": Case((3000, 2079, 2080, 2081), group=5, page_size=32, block_size=32, k=64),
}
"""Steps that run in one launch."""
ALL = DECODE | BEYOND | LONG


def room(inputs: Inputs, case: Case, with_pages: bool = True, stops: bool = False) -> DecodeOutput:
    """The output memory of a step, filled with garbage that the step must overwrite."""
    assert case.k is not None
    output, rows = inputs.empty_output(), (len(inputs.query), case.num_kv_heads)
    if with_pages:
        pages = torch.full((*rows, case.k), 7, dtype=torch.int32, device="cuda")
        output = replace(output, pages=pages)
    if stops:
        counters = torch.zeros(case.num_kv_heads, 4, dtype=torch.int64, device="cuda")
        output = replace(output, pages_read=torch.full(rows, -7, dtype=torch.int32, device="cuda"), counters=counters)
    return output


def step(
    inputs: Inputs,
    case: Case,
    pages: torch.Tensor | None = None,
    rule: StopRule | None = None,
    launch: object = None,
    lists: bool = False,
) -> DecodeOutput:
    """Decodes with a given launch or the batch's own; with `lists` the output has pages."""
    from sparse_kernels.sparse_decode import cuda

    batch, cache, softmax, selection, routing, _ = inputs.decode_arguments(case, rule)
    output = room(inputs, case, lists, stops=rule is not None)
    cuda.sparse_decode(replace(batch, pages=pages), cache, softmax, selection, routing, rule, output, launch)
    return output


def unselected(inputs: Inputs, case: Case) -> torch.Tensor:
    """Rows that have no list: skipped groups, padding, and contexts that are attended whole."""
    batch = inputs.batch(case)
    contexts, budgets = batch.context_lens(), batch.token_budgets()
    k = torch.full_like(contexts, case.k) if budgets is None else budgets.clamp(max=case.k)
    whole = (contexts // case.page_size <= k) | (contexts <= case.dense_tokens)
    if batch.dense_requests is not None:
        whole |= batch.dense_requests.repeat_interleave(case.queries)
    whole = whole[:, None].expand(-1, case.num_kv_heads)
    if inputs.routing is None:
        return whole
    skipped = inputs.group_scores(case) >= inputs.routing.thresholds(contexts.clamp(min=1))
    return whole | skipped


def check_lists(pages: torch.Tensor, inputs: Inputs, case: Case) -> None:
    """Every list has the required number of distinct complete pages of its context, and -1 after them."""
    none, budgets = unselected(inputs, case), inputs.batch(case).token_budgets()
    assert bool((pages[none] == -1).all())
    lengths = inputs.context_lens(case) // case.page_size
    k = torch.full_like(lengths, case.k) if budgets is None else budgets.clamp(max=case.k)
    for row, head in (~none).nonzero().tolist():
        listed = pages[row, head]
        count = int(k[row])
        assert bool((listed[count:] == -1).all())
        assert bool(((listed[:count] >= 0) & (listed[:count] < lengths[row])).all())
        assert len(listed[:count].unique()) == count
        assert bool((listed[:count] == 0).any()), "the sink page is always selected"


@pytest.mark.parametrize("name", ALL)
def test_pages_that_a_step_chose_give_the_same_bits(name: str) -> None:
    case = ALL[name]
    inputs = Inputs(case)
    plain, written = step(inputs, case), step(inputs, case, lists=True)
    assert written.pages is not None
    assert torch.equal(written.heads, plain.heads), "writing the selection changes bits"
    check_lists(written.pages, inputs, case)
    # Statistics and scores must not matter any more.
    vectors = inputs.statistics.vectors
    vectors.view(torch.int8 if vectors.itemsize == 1 else torch.int16).zero_()
    assert torch.equal(step(inputs, case, written.pages).heads, plain.heads)


@pytest.mark.parametrize("name", DECODE)
def test_the_pages_do_not_depend_on_the_launch(name: str) -> None:
    case = DECODE[name]
    inputs = Inputs(case)
    first, *others = [step(inputs, case, launch=one, lists=True) for one in launches(case.group, case.head_size)]
    assert first.pages is not None
    for other in others:
        assert torch.equal(other.pages, first.pages)
        assert torch.equal(other.heads, first.heads)
    for launch in launches(case.group, case.head_size):
        assert torch.equal(step(inputs, case, first.pages, launch=launch).heads, first.heads)


@pytest.mark.parametrize("name", ["ragged", "three query tokens", "newest pages", "routed", "group of 16, pages of 16"])
def test_pages_in_pieces_give_the_same_bits(name: str) -> None:
    from sparse_kernels.sparse_decode import cuda

    case = CASES[name]
    inputs = Inputs(case)
    batch, cache, softmax, selection, routing, _ = inputs.decode_arguments(case)
    written, again = room(inputs, case), room(inputs, case, with_pages=False)
    cuda.decode_in_pieces(batch, cache, softmax, selection, routing, written)
    check_lists(written.pages, inputs, case)
    cuda.decode_in_pieces(replace(batch, pages=written.pages), cache, softmax, selection, routing, again)
    assert torch.equal(again.heads, written.heads)


BUDGETS = {
    "ragged": ((64, 24, 8, 500, 88), 1024),
    "three query tokens": ((64, 5, 300), 300),
    "newest pages": ((64, 5, 300), 1024),
    "budget of 2,048 pages": ((64, 2048, 1025, 300, 64), 2048),
    "group of 32, routed": ((64, 24, 8, 33), 64),
}


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("dense", [None, 1])
def test_lists_of_requests_with_budgets(name: str, dense: int | None) -> None:
    budgets, k = BUDGETS[name]
    case = replace(ALL[name], k=k)
    inputs = Inputs(case).asking(budgets, dense)
    plain, written = step(inputs, case), step(inputs, case, lists=True)
    assert torch.equal(written.heads, plain.heads)
    check_lists(written.pages, inputs, case)
    assert torch.equal(step(inputs, case, written.pages).heads, plain.heads)


def random_lists(inputs: Inputs, case: Case, seed: int = 0) -> torch.Tensor:
    """Some complete pages of each context in any order, with gaps of entries without a page."""
    generator = torch.Generator().manual_seed(seed)
    lengths = inputs.context_lens(case).clamp(min=0) // case.page_size
    lists = torch.empty(len(lengths), case.num_kv_heads, case.k, dtype=torch.int32)
    for row, count in enumerate(lengths.tolist()):
        for head in range(case.num_kv_heads):
            pages = torch.randperm(max(count, 1), generator=generator)[: case.k]
            lists[row, head] = torch.nn.functional.pad(pages, (0, case.k - len(pages)), value=-1).int()
            nowhere = torch.tensor([-1, -2, count, count + 1, 2**31 - 1, -(2**31)])
            gaps = torch.rand(case.k, generator=generator) < (0.0, 0.3, 0.97)[(row + head) % 3]
            drawn = nowhere[torch.randint(len(nowhere), (case.k,), generator=generator)]
            lists[row, head] = torch.where(gaps, drawn, lists[row, head]).int()
    return lists.cuda()


GIVEN = [
    "ragged", "page boundaries", "multi-head, small blocks", "group of 2", "group of 3, pages of 32", "heads of 256",
    "group of 8, heads of 64", "group of 16, pages of 16", "fp8 cache", "three query tokens", "padded requests",
    "learned sinks", "softcap", "short contexts whole", "routed", "heads of 80", "many requests", "group of 17",
    "boundaries of 1,024 pages", "budget of 2,048 pages, three query tokens", "budget of 2,048 pages, routed",
    "group of 32, learned sinks", "65,536 pages and one", "group of 5, pages of 32, small blocks",
]  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_a_step_attends_exactly_the_pages_of_its_list(name: str) -> None:
    case = ALL[name]
    inputs = Inputs(case)
    lists = random_lists(inputs, case)
    found = step(inputs, case, lists).heads
    batch, *arguments = inputs.decode_arguments(case)
    expected = torch.full_like(found, torch.nan)
    reference_decode(replace(batch, pages=lists), *arguments, DecodeOutput(expected))
    assert_close(found, expected)
    # Entries without a page change no bit.
    lengths = inputs.context_lens(case).clamp(min=0) // case.page_size
    compact = attended_pages(lists, lengths, case.k).int()
    assert torch.equal(step(inputs, case, compact).heads, found)
    # Neighbours change no bit.
    for row in range(0, len(case.contexts), 7):
        rows = slice(row * case.queries, (row + 1) * case.queries)
        assert torch.equal(step(inputs.row(row), case, lists[rows]).heads, found[rows])


@pytest.mark.parametrize("name", ["ragged", "heads of 80", "group of 32, learned sinks", "budget of 2,048 pages"])
def test_pages_outside_the_lists_are_not_read(name: str) -> None:
    """NaN in keys and values of pages outside every list changes no bit."""
    case = ALL[name]
    inputs = Inputs(case)
    written = step(inputs, case, lists=True)
    assert written.pages is not None
    none = unselected(inputs, case)
    for row, head in (~none).nonzero().tolist():
        unread = torch.ones(int(inputs.seq_lens[row]) // case.page_size, dtype=torch.bool, device="cuda")
        unread[written.pages[row, head].clamp(min=0).long()] = False
        token = unread.nonzero().squeeze(1)[:, None] * case.page_size + torch.arange(case.page_size, device="cuda")
        token = token.flatten()
        block = inputs.block_table[row, token // case.block_size].long()
        inputs.cache[block, head, token % case.block_size] = torch.nan
    assert torch.equal(step(inputs, case, written.pages).heads, written.heads)


@pytest.mark.parametrize("group", [1, 4, 16, 32])
@pytest.mark.parametrize("k", [64, 2048])
def test_an_empty_list_leaves_the_incomplete_page(group: int, k: int) -> None:
    case = Case((20000, 20001, 20007, 0, 24000, 24003), group=group, head_size=64, k=k)
    inputs = Inputs(case)
    empty = torch.full((6, 2, k), -1, dtype=torch.int32, device="cuda")
    found = step(inputs, case, empty).heads
    assert bool((found[[0, 3, 4]] == 0).all())
    expected = torch.full_like(found, torch.nan)
    batch, *arguments = inputs.decode_arguments(case)
    reference_decode(replace(batch, pages=empty), *arguments, DecodeOutput(expected))
    assert_close(found, expected)


STOPPING = {
    "best first": Case((9000, 517, 1, 4096, 7000), k=400),
    "newest of a budget": Case((3000, 517, 4096), k=200, statistics=False),
    "group of 16": Case((3000, 4095), group=16, k=200),
    "three query tokens": Case((3000, 517, 4096), queries=3, k=200),
    "fp8 cache": Case((3000, 517, 4096), block_size=256, eight_bit_cache=True, k=200),
    "heads of 256, pages of 32": Case((6000, 4095), head_size=256, page_size=32, k=60),
    "routed": Case((3000, 517, 4096), skipped=0.5, k=200),
}


@pytest.fixture
def _clusters() -> None:
    """Attention over a selection can stop only on GPUs with clusters of thread blocks."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs clusters of blocks")


@pytest.mark.usefixtures("_clusters")
@pytest.mark.parametrize("rule", [RULE, EAGER], ids=["some stop", "all stop"])
@pytest.mark.parametrize("name", STOPPING)
def test_attention_over_a_list_stops_as_over_the_selection(name: str, rule: StopRule) -> None:
    case = STOPPING[name]
    inputs = stopping_inputs(case)
    plain, written = step(inputs, case, rule=rule), step(inputs, case, rule=rule, lists=True)
    check_lists(written.pages, inputs, case)
    again = step(inputs, case, written.pages, rule)
    for other in (written, again):
        assert torch.equal(other.heads, plain.heads)
        assert torch.equal(other.pages_read, plain.pages_read)
        assert torch.equal(other.counters, plain.counters)
    if rule is EAGER:
        assert bool((plain.pages_read[~unselected(inputs, case)] < case.k).all())


@pytest.mark.usefixtures("_clusters")
@pytest.mark.parametrize("name", ["best first", "group of 16", "three query tokens"])
def test_attention_over_a_list_with_gaps_stops_where_the_reference_does(name: str) -> None:
    case = STOPPING[name]
    inputs = stopping_inputs(case)
    lists = random_lists(inputs, case)
    never = RULE._replace(patience=0, block_tokens=512)
    found = step(inputs, case, lists, EAGER)
    whole, plain = step(inputs, case, lists, rule=never), step(inputs, case, lists)
    assert torch.equal(whole.heads, plain.heads)
    expected = room(inputs, case, with_pages=False, stops=True)
    batch, *arguments = inputs.decode_arguments(case, never)
    reference_decode(replace(batch, pages=lists), *arguments, expected)
    assert torch.equal(whole.pages_read, expected.pages_read)
    assert torch.equal(whole.counters, expected.counters)
    assert bool((found.pages_read <= whole.pages_read).all())


@pytest.mark.parametrize("name", ["ragged", "newest pages", "budget of 2,048 pages", "group of 32, routed", "quarters"])
def test_a_graph_passes_pages_from_a_step_to_the_next(name: str) -> None:
    """The second step of the graph is another layer: it has other queries and uses the pages of the first."""
    from sparse_kernels.sparse_decode import cuda

    case = ALL[name]
    inputs = Inputs(case)
    other = copy(inputs)
    other.query = inputs.query.flip(0).contiguous()
    first, second = room(inputs, case), room(inputs, case, with_pages=False)

    def run() -> None:
        batch, *arguments = inputs.decode_arguments(case)
        cuda.sparse_decode(batch, *arguments, first)
        batch, *arguments = other.decode_arguments(case)
        cuda.sparse_decode(replace(batch, pages=first.pages), *arguments, second)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for less in (0, 1, 300):
        inputs.seq_lens.copy_((torch.tensor(case.contexts) - less).clamp(min=0))
        graph.replay()
        expected = step(inputs, case, lists=True)
        assert torch.equal(first.heads, expected.heads)
        assert torch.equal(first.pages, expected.pages)
        assert torch.equal(second.heads, step(other, case, expected.pages).heads)


def test_lists_are_checked_on_a_gpu_too() -> None:
    case = Case((3000, 517))
    inputs = Inputs(case)
    batch, cache, softmax, selection, _, _ = inputs.decode_arguments(case)
    assert isinstance(batch, DecodeBatch)
    assert isinstance(selection, PageSelection)
    lists = torch.zeros(2, 2, 64, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"^pages: got int32 \[2, 2, 64\] on cpu, allowed: int32 \[2, 2, 64\] on cuda:0"
    ):
        sparse_decode(replace(batch, pages=lists), cache, softmax, selection)
    found = sparse_decode(replace(batch, pages=lists.cuda()), cache, softmax, selection)
    assert found.isfinite().all()
