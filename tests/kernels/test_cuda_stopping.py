"""Attention that stops on CUDA, against the torch references, on a GPU."""

from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import DecodeOutput, PageSelection
from sparse_kernels.paging import PagedTensor
from sparse_kernels.sparse_decode.launches import MOST_PAGES_AT_ONCE
from sparse_kernels.sparse_decode.reference import sparse_decode as reference_decode
from sparse_kernels.split_attention import Stopping, stop_scratch
from sparse_kernels.split_attention.reference import split_attention as reference_split
from sparse_kernels.stopping import StopRule, count_reads
from support.cuda import ON_GPU, Case, Inputs, assert_close, checked_scores, decode, stopping_inputs

pytestmark = ON_GPU


RULE = StopRule(scale_tolerance=0.3, direction_tolerance=0.03, patience=2, block_tokens=64)
STOPPING = {
    "every page": (Case((3000, 517, 1, 4096, 700), k=None, page_size=16), RULE),
    "every page, blocks of 512": (
        Case((9000, 517, 5120, 8192), k=None, page_size=16),
        RULE._replace(block_tokens=512, patience=1),
    ),
    "every page, sinks first": (Case((3000, 517, 16, 4096), k=None, page_size=16), RULE._replace(least_pages=30)),
    "every page, many pieces": (
        Case((70000, 20000, 700), k=None, page_size=16),
        RULE._replace(scale_tolerance=1000.0, direction_tolerance=16.0, patience=150),
    ),
    "every page, patience for all pieces but two": (
        Case((3000, 2944, 517), k=None, page_size=16),
        RULE._replace(scale_tolerance=1000.0, direction_tolerance=16.0, patience=45),
    ),
    "every page, multi-head, small blocks": (
        Case((3000, 517, 8, 4096), k=None, group=1, block_size=16, page_size=16),
        RULE,
    ),
    "every page, group of 3, pages of 32": (Case((3000, 4095), k=None, group=3, page_size=32), RULE),
    "every page, group of 8, heads of 64": (Case((3000, 4095), k=None, group=8, head_size=64), RULE),
    "every page, group of 16": (Case((3000, 4095), k=None, group=16, page_size=16), RULE._replace(block_tokens=128)),
    "every page, group of 16, heads of 256": (
        Case((3000, 4095), k=None, num_kv_heads=1, group=16, head_size=256),
        RULE,
    ),
    "every page, learned sinks": (Case((3000, 517, 4096), k=None, sinks=torch.float32), RULE),
    "every page, softcap": (Case((3000, 517), k=None, softcap=60.0), RULE),
    "every page, three query tokens": (Case((3000, 517, 4096), k=None, queries=3), RULE),
    "every page, padded, short and dense": (Case((3000, 0, 517, 4096, 2000), k=None, dense_tokens=2500), RULE),
    "page boundaries": (Case((1023, 1024, 1025, 1031, 1032, 1033, 2048), k=100), RULE),
    "best first": (Case((9000, 517, 1, 4096, 7000), k=400), RULE),
    "best first, blocks of 256": (Case((9000, 517, 1, 4096, 7000), k=500), RULE._replace(block_tokens=256, patience=1)),
    "best first, bounds": (Case((3000, 517, 4096), k=200, kind="bounds"), RULE),
    "newest of a budget": (Case((3000, 517, 4096), k=200, statistics=False), RULE),
    "multi-head": (Case((3000, 517, 8, 4096), group=1, block_size=16, k=200), RULE),
    "group of 2": (Case((3000, 517, 8, 4096), group=2, k=200), RULE),
    "group of 3, pages of 32": (Case((3000, 4095), group=3, page_size=32, k=60), RULE),
    "group of 8, heads of 64": (Case((3000, 4095), group=8, head_size=64, k=200), RULE),
    "group of 16": (Case((3000, 4095), group=16, k=200), RULE._replace(block_tokens=128)),
    "group of 16, heads of 256": (Case((3000, 4095), num_kv_heads=1, group=16, head_size=256, k=200), RULE),
    **{
        f"{name}heads of {size}": (Case((3000, 517, 4095), head_size=size, k=k, page_size=page), RULE)
        for size in (80, 96, 112, 192)
        for name, k, page in (("", 200, 8), ("every page, ", None, 16))
    },
    "heads of 256": (Case((3000, 4095), head_size=256, k=200), RULE._replace(block_tokens=256)),
    "fp8 cache": (Case((3000, 517, 4096), block_size=256, eight_bit_cache=True, k=200), RULE),
    "every page, fp8 cache": (
        Case((3000, 4095), k=None, block_size=512, eight_bit_cache=True, page_size=16, head_size=64),
        RULE._replace(block_tokens=512, patience=1),
    ),
    "learned sinks": (Case((3000, 517, 4096), sinks=torch.float32, k=200), RULE),
    "softcap": (Case((3000, 517), softcap=60.0, k=200), RULE),
    "three query tokens": (Case((3000, 517, 4096), queries=3, k=200), RULE),
    "padded, short and dense": (Case((3000, 0, 517, 4096, 2000), dense_tokens=2500, k=200), RULE),
}
"""Cases and rules under which some rows stop and some do not."""
EVERY_PAGE = [name for name, (case, _) in STOPPING.items() if case.k is None]


def stopping_launches(case: Case) -> list[object]:
    """Several launches with equal results."""
    if case.k is None:
        from sparse_kernels.split_attention import cuda

        return [cuda.Launch(4096), cuda.Launch(4096, 8), cuda.Launch(1, 2), cuda.Launch(7, 32)]
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs clusters of blocks")
    from sparse_kernels.cuda.shared_memory import least_cluster
    from sparse_kernels.sparse_decode.launches import Launch

    least = max(4, least_cluster(case.group, case.head_size))
    listed = Launch(False, 8, 16, 1, listed=True)
    return [Launch(True, 8, 8, 1), Launch(True, least, 8, 1), Launch(False, 8, 16, 1), listed]


def counted_output(inputs: Inputs, case: Case) -> DecodeOutput:
    """An output filled with garbage that a kernel must overwrite."""
    shape, device = (len(inputs.query), case.num_kv_heads), inputs.query.device
    pages_read = torch.full(shape, -1, dtype=torch.int32, device=device)
    counters = torch.zeros((case.num_kv_heads, 4), dtype=torch.int64, device=device)
    return replace(inputs.empty_output(), pages_read=pages_read, counters=counters)


def stopped(inputs: Inputs, case: Case, rule: StopRule, launch: object = None) -> DecodeOutput:
    from sparse_kernels.sparse_decode import cuda

    output = counted_output(inputs, case)
    if case.k is None:
        every_page(inputs, case, rule, output, launch=launch)
    else:
        cuda.sparse_decode(*inputs.decode_arguments(case, rule), output, launch)
    return output


def every_page(
    inputs: Inputs,
    case: Case,
    rule: StopRule,
    output: DecodeOutput,
    requests: int | None = None,
    launch: object = None,
) -> None:
    """Reads the first page before the newest, with scratch for `requests` requests, which does not change."""
    from sparse_kernels.split_attention import cuda

    stopping = stopping_of(inputs, case, rule, requests)
    cuda.split_attention(*inputs.split_arguments(case, stopping), output, launch)
    assert stopping.scratch is not None
    assert not stopping.scratch.any()


def stopping_of(inputs: Inputs, case: Case, rule: StopRule, requests: int | None = None) -> Stopping:
    rows = inputs.batch(case).tokens_per_request * (requests or len(inputs.seq_lens)) * case.num_kv_heads
    context_tokens = inputs.block_table.shape[1] * case.block_size
    return Stopping(rule, 1, stop_scratch(rule, rows, context_tokens, inputs.query.device))


def expected_reads(inputs: Inputs, case: Case, rule: StopRule) -> DecodeOutput:
    output = counted_output(inputs, case)
    output.heads.zero_()
    if case.k is None:
        reference_split(*inputs.split_arguments(case, Stopping(rule, 1)), output)
    else:
        reference_decode(*inputs.decode_arguments(case, rule), output)
    return output


def equal(one: DecodeOutput, other: DecodeOutput) -> bool:
    assert one.pages_read is not None
    assert other.pages_read is not None
    assert one.counters is not None
    assert other.counters is not None
    return (
        torch.equal(one.heads, other.heads)
        and torch.equal(one.pages_read, other.pages_read)
        and torch.equal(one.counters, other.counters)
    )


def looser(rule: StopRule, factor: float) -> StopRule:
    return rule._replace(
        scale_tolerance=rule.scale_tolerance * factor, direction_tolerance=rule.direction_tolerance * factor
    )


@pytest.mark.parametrize("name", STOPPING)
def test_attention_stops_where_the_reference_does_whatever_the_launch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    case, rule = STOPPING[name]
    inputs = stopping_inputs(case)
    output, *others = [stopped(inputs, case, rule, launch) for launch in stopping_launches(case)]
    for other in others:
        assert equal(output, other)
    expected = expected_reads(inputs, case, rule)
    # Weights are rounded to 16 bits: a change at the tolerance may fall on either side of it.
    sooner = expected_reads(inputs, case, looser(rule, 1.05)).pages_read
    later = expected_reads(inputs, case, looser(rule, 0.95)).pages_read
    wanted, pages_read = expected.pages_read, output.pages_read
    attends = wanted >= 0
    assert bool(((pages_read >= sooner) & (pages_read <= later))[attends].all())
    same = (pages_read == wanted) & attends
    assert same.float().mean() >= 0.5 * attends.float().mean()
    most = wanted.amax(dim=1, keepdim=True)
    assert bool((wanted < most.amax()).any()), "nothing stops"
    rows = same[:, :, None].expand(-1, -1, case.group).flatten(1)
    assert_close(output.heads[rows], expected.heads[rows])
    if bool(same[attends].all()):
        assert torch.equal(output.counters, expected.counters)


def test_a_context_that_stops_may_have_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    case, rule = Case((1048576, 1048583, 900), num_kv_heads=1, head_size=32, k=300), RULE
    inputs = stopping_inputs(case)
    output, expected = stopped(inputs, case, rule), expected_reads(inputs, case, rule)
    sooner = expected_reads(inputs, case, looser(rule, 1.05)).pages_read
    later = expected_reads(inputs, case, looser(rule, 0.95)).pages_read
    assert bool(((output.pages_read >= sooner) & (output.pages_read <= later)).all())
    assert bool((expected.pages_read < case.k).any()), "nothing stops"


@pytest.mark.parametrize("name", STOPPING)
def test_without_patience_the_bits_are_those_of_attention_that_cannot_stop(name: str) -> None:
    case, _ = STOPPING[name]
    if not case.statistics or case.k is None:
        pytest.skip("without scores the newest page comes first, where attention that cannot stop has it last")
    inputs = stopping_inputs(case)
    never = RULE._replace(patience=0, block_tokens=512)
    for launch in stopping_launches(case):
        assert torch.equal(stopped(inputs, case, never, launch).heads, decode(inputs, case, launch))
    if case.k <= MOST_PAGES_AT_ONCE:
        assert torch.equal(stopped(inputs, case, never).heads, decode(inputs, case))


@pytest.mark.parametrize("name", EVERY_PAGE)
def test_stop_tests_change_no_bit(name: str) -> None:
    case, rule = STOPPING[name]
    inputs = stopping_inputs(case)
    plain = stopped(inputs, case, rule._replace(patience=0))
    for launch in stopping_launches(case):
        assert equal(plain, stopped(inputs, case, rule._replace(scale_tolerance=0.0), launch))
    pages = inputs.context_lens(case).clamp(min=0)[:, None] // case.page_size
    assert torch.equal(plain.pages_read, pages.expand_as(plain.pages_read))


def only(inputs: Inputs, case: Case, row: int, pages: int) -> Inputs:
    """The request of a row, with a context that consists of the first `pages` pages read and the incomplete page."""
    found = Inputs(Case((1,)))
    context = int(inputs.seq_lens[row])
    complete = context // case.page_size
    order = torch.tensor([0, *range(complete - 1, 0, -1)][:pages], device="cuda").sort().values
    positions = torch.arange(context, device="cuda")
    positions = positions[torch.isin(positions // case.page_size, order) | (positions >= complete * case.page_size)]
    length, size = len(positions), case.block_size
    rows = inputs.cache[:, :, :size]
    blocks = inputs.block_table[row, positions // size].long()
    cache = torch.full((-(-length // size), *rows.shape[1:]), torch.nan, dtype=rows.dtype, device="cuda")
    place = torch.arange(length, device="cuda")
    cache[place // size, :, place % size] = rows[blocks, :, positions % size]
    found.query, found.sinks, found.routing = inputs.query[row : row + 1], inputs.sinks, None
    found.keys = PagedTensor.from_rows(cache[..., : case.head_size], case.page_size)
    found.values = PagedTensor.from_rows(cache[..., case.head_size :], case.page_size)
    found.block_table = torch.arange(len(cache), dtype=torch.int32, device="cuda")[None]
    found.seq_lens = torch.tensor([length], dtype=torch.int32, device="cuda")
    return found


@pytest.mark.parametrize("name", ["every page, blocks of 512", "every page, sinks first", "every page, many pieces"])
def test_attention_that_stopped_has_the_bits_of_attention_over_what_it_read(name: str) -> None:
    case, rule = STOPPING[name]
    inputs = stopping_inputs(case)
    output = stopped(inputs, case, rule)
    for row, head in torch.cartesian_prod(torch.arange(len(case.contexts)), torch.arange(case.num_kv_heads)).tolist():
        cut = only(inputs, case, row, int(output.pages_read[row, head]))
        alone = cut.empty_output()
        every_page(cut, case, rule._replace(patience=0), alone)
        heads = slice(head * case.group, (head + 1) * case.group)
        assert torch.equal(alone.heads[0, heads], output.heads[row, heads])


@pytest.mark.parametrize("name", [name for name in EVERY_PAGE if len(STOPPING[name][0].contexts) > 2])
def test_a_batch_is_attended_in_parts_where_scratch_is_short(name: str) -> None:
    case, rule = STOPPING[name]
    inputs = stopping_inputs(case)
    together = stopped(inputs, case, rule)
    for requests in (1, 2):
        in_parts = counted_output(inputs, case)
        every_page(inputs, case, rule, in_parts, requests)
        assert equal(in_parts, together)


@pytest.mark.parametrize("patience", [0, 1])
def test_a_stopped_output_has_the_bits_of_attention_over_the_pages_it_read(patience: int) -> None:
    from sparse_kernels.sparse_decode import sparse_decode

    case, rule = STOPPING["newest of a budget"]
    stopping_launches(case)
    inputs = stopping_inputs(case)
    output = stopped(inputs, case, rule._replace(patience=patience, block_tokens=512))
    for row, context in enumerate(case.contexts):
        pages = context // case.page_size
        assert case.k is not None
        if pages <= case.k:
            continue
        slot = torch.arange(case.k, device="cuda")
        order = torch.where(slot < 1, slot, pages - slot)
        for head in range(case.num_kv_heads):
            chosen = order[: int(output.pages_read[row, head])].int().expand(1, case.num_kv_heads, -1).contiguous()
            batch = replace(inputs.row(row).batch(case), pages=chosen)
            selection = PageSelection(chosen.shape[2])
            alone = sparse_decode(batch, inputs.kv(case), inputs.softmax(case), selection)
            heads = slice(head * case.group, (head + 1) * case.group)
            assert torch.equal(alone[0, heads], output.heads[row, heads])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "name",
    [
        "every page", "every page, group of 16", "every page, fp8 cache", "every page, three query tokens",
        "best first", "best first, bounds", "group of 16", "fp8 cache", "three query tokens",
    ],
)  # fmt: skip
def test_skipped_groups_read_nothing_and_others_stop_as_without_routing(name: str, share: float) -> None:
    case, rule = STOPPING[name]
    inputs = stopping_inputs(case)
    routing = inputs.forced(case, share)
    skipped = inputs.group_scores(case) >= routing.coefficients[0, 0]
    assert int(skipped.sum()) == round(share * skipped.numel())
    may_stop = (inputs.context_lens(case) // case.page_size > (case.k or 0))[:, None] & ~skipped
    for launch in stopping_launches(case):
        inputs.routing = None
        plain = stopped(inputs, case, rule, launch)
        inputs.routing = routing
        routed = stopped(inputs, case, rule, launch)
        heads = routed.heads.unflatten(1, (*skipped.shape[1:], case.group))
        assert torch.equal(heads, plain.heads.view_as(heads).masked_fill(skipped[..., None, None], 0))
        assert torch.equal(routed.pages_read, plain.pages_read.masked_fill(skipped, 0))
        counted = count_reads(routed.pages_read, inputs.context_lens(case), case.page_size, rule.block_tokens)
        assert torch.equal(routed.counters, (counted * may_stop[..., None]).sum(dim=0))


@pytest.mark.parametrize("name", ["every page", "best first"])
def test_a_graph_stops_for_other_lengths_too(name: str) -> None:
    from sparse_kernels.sparse_decode import cuda as decode_cuda
    from sparse_kernels.split_attention import cuda as split_cuda

    case, rule = STOPPING[name]
    stopping_launches(case)
    inputs = stopping_inputs(case)
    stopped(inputs, case, rule)

    output = replace(counted_output(inputs, case), counters=None)
    assert output.pages_read is not None
    stopping = stopping_of(inputs, case, rule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if case.k is None:
            split_cuda.split_attention(*inputs.split_arguments(case, stopping), output)
        else:
            decode_cuda.sparse_decode(*inputs.decode_arguments(case, rule), output)
    for lengths in ((3000, 517, 1, 4096, 700), (2999, 16, 0, 4001, 640), (64, 100, 1, 2000, 333)):
        inputs.seq_lens.copy_(torch.tensor(lengths))
        output.pages_read.fill_(-1)
        graph.replay()
        expected = stopped(inputs, case, rule)
        assert torch.equal(output.heads, expected.heads)
        assert torch.equal(output.pages_read, expected.pages_read)
        assert not stopping.scratch.any()


@pytest.mark.parametrize("name", ["every page", "best first"])
def test_a_stopping_request_does_not_depend_on_its_neighbours(name: str) -> None:
    case, rule = STOPPING[name]
    stopping_launches(case)
    inputs = stopping_inputs(case)
    together = stopped(inputs, case, rule)
    for row in (0, 3):
        alone = stopped(inputs.row(row), case, rule)
        assert torch.equal(alone.heads[0], together.heads[row])
        assert torch.equal(alone.pages_read[0], together.pages_read[row])


@pytest.mark.parametrize("name", ["best first", "newest of a budget", "group of 16", "three query tokens"])
def test_requests_that_stop_read_within_their_own_budgets(name: str) -> None:
    case, rule = STOPPING[name]
    case = replace(case, k=400)
    inputs = stopping_inputs(case)
    budgets = (400, 100, 64, 200, 30, 300, 17)[: len(case.contexts)]
    for launch in stopping_launches(case):
        together = stopped(inputs.asking(budgets), case, rule, launch)
        for row, budget in enumerate(budgets):
            alone = stopped(inputs.row(row), replace(case, k=budget), rule, launch)
            rows = slice(row * case.queries, (row + 1) * case.queries)
            assert torch.equal(alone.heads, together.heads[rows])
            assert torch.equal(alone.pages_read, together.pages_read[rows])
