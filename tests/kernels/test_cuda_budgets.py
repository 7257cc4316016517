"""Requests with different budgets on CUDA, on a GPU."""

from dataclasses import replace

import pytest
import torch
from sparse_kernels.batch import DecodeOutput
from sparse_kernels.sparse_decode.reference import sparse_decode as reference_decode
from support.cuda import BEYOND, LONG, ON_GPU, Case, Inputs, assert_close, checked_scores, decode, in_pieces, launches

pytestmark = ON_GPU


MIXED = {
    "ragged": (Case((3000, 517, 1, 4096, 700), k=1024), (64, 24, 8, 500, 88)),
    "page boundaries": (Case((511, 512, 513, 519, 520, 521, 1024), k=1024), (63, 64, 64, 64, 64, 64, 127)),
    "quarters": (Case((3000, 517, 4096, 4096), k=300, kind="quarters", format="int4"), (300, 3, 64, 200)),
    "sketch, heads of 64, small blocks": (
        Case((3000, 517, 4096), k=128, head_size=64, block_size=16, kind="sketch", format="int2"),
        (128, 16, 5),
    ),
    "quarters, fp8 cache": (
        Case((3000, 517, 4096), k=1024, kind="quarters", format="int4", block_size=256, eight_bit_cache=True),
        (64, 1024, 17),
    ),
    "group of 16, pages of 16": (Case((2000, 1501, 900), group=16, page_size=16, k=64), (64, 12, 3)),
    "heads of 256": (Case((2000, 1501, 3000), head_size=256, k=1024), (64, 100, 3)),
    "heads of 80": (Case((3000, 517, 4096), head_size=80, k=1024), (64, 5, 300)),
    "bounds": (Case((3000, 517, 4096), kind="bounds", k=200), (64, 5, 200)),
    "three query tokens": (Case((3000, 517, 4096, 1000), queries=3, k=1024), (64, 5, 300, 124)),
    "padded requests": (Case((3000, 0, 517, 0), k=1024), (200, 64, 5, 64)),
    "learned sinks": (Case((3000, 517, 4096), sinks=torch.float32, k=1024), (64, 5, 300)),
    "short contexts whole": (Case((3000, 517, 4096), dense_tokens=600, k=1024), (64, 5, 300)),
    "routed": (Case((3000, 517, 1, 4096, 700), num_kv_heads=4, skipped=0.6, k=1024), (64, 24, 8, 500, 88)),
    "newest pages": (Case((3000, 517, 4096), statistics=False, k=1024), (64, 5, 300)),
    "many requests": (Case((3000, 517, 1, 4096, 700) * 30, k=1024), (64, 24, 8, 500, 88) * 30),
}
"""Budgets of requests in one batch. The case has the largest possible budget."""


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dense", [None, 1])
def test_requests_with_budgets_have_the_bits_they_have_alone(
    name: str, dense: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, budgets = MIXED[name]
    inputs = Inputs(case).asking(budgets, dense)
    outputs = [decode(inputs, case, launch) for launch in (None, *launches(case.group, case.head_size))]
    pieces = in_pieces(inputs, case)
    for row in range(len(budgets)) if len(budgets) < 10 else (0, 3, 77, 149):
        alone, own = inputs.row(row), replace(case, k=budgets[row])
        rows = slice(row * case.queries, (row + 1) * case.queries)
        expected = decode(alone, own)
        for output in outputs:
            assert torch.equal(output[rows], expected)
        assert torch.equal(pieces[rows], in_pieces(alone, own))
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    expected = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    reference_decode(*inputs.decode_arguments(case), DecodeOutput(expected))
    assert_close(outputs[0], expected)
    assert_close(pieces, expected)


MIXED_PIECES = {
    "budget of 2,048 pages": (64, 2048, 1025, 300, 64),
    "budget of 2,048 pages, three query tokens": (2048, 64, 1500),
    "budget of 2,048 pages, routed": (2048, 64, 20),
    "budget of 2,048 newest pages": (2048, 64, 1500),
    "group of 32, routed": (64, 24, 8, 33),
    "group of 32, learned sinks": (64, 5),
}


@pytest.mark.parametrize("name", MIXED_PIECES)
@pytest.mark.parametrize("dense", [None, 1])
def test_pieces_of_requests_with_budgets_have_the_bits_they_have_alone(
    name: str, dense: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, budgets = BEYOND[name], MIXED_PIECES[name]
    inputs = Inputs(case).asking(budgets, dense)
    output = decode(inputs, case)
    for row, budget in enumerate(budgets):
        rows = slice(row * case.queries, (row + 1) * case.queries)
        assert torch.equal(output[rows], in_pieces(inputs.row(row), replace(case, k=budget)))
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    expected = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    reference_decode(*inputs.decode_arguments(case), DecodeOutput(expected))
    assert_close(output, expected)
    # One request at a time.
    monkeypatch.setattr("sparse_kernels.sparse_decode.scratch.PIECES_BYTES", 1)
    assert torch.equal(decode(inputs, case), output)


@pytest.mark.parametrize("case", [LONG["65,536 pages and one"], LONG["131,072 pages, two query tokens"]])
def test_long_contexts_read_their_own_budgets(case: Case) -> None:
    most = replace(case, k=1024)
    budgets = (1024, 300, 64, 5, 64)[: len(case.contexts)]
    inputs = Inputs(most).asking(budgets)
    output = decode(inputs, most)
    for row, budget in enumerate(budgets):
        rows = slice(row * case.queries, (row + 1) * case.queries)
        assert torch.equal(output[rows], decode(inputs.row(row), replace(case, k=budget)))


@pytest.mark.parametrize("name", ["ragged", "quarters", "newest pages"])
@pytest.mark.parametrize("pieces", [False, True])
def test_a_graph_serves_other_budgets(name: str, pieces: bool) -> None:
    from sparse_kernels.sparse_decode import cuda

    case, budgets = MIXED[name]
    if pieces:
        case = replace(case, k=2048)
    inputs = Inputs(case).asking(budgets, dense=0)
    decode(inputs, case)
    out = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.sparse_decode(*inputs.decode_arguments(case), DecodeOutput(out))
    assert inputs.budgets is not None
    assert inputs.dense_requests is not None
    for turn in range(3):
        inputs.budgets.copy_(torch.tensor(budgets).roll(turn))
        inputs.dense_requests.copy_(torch.arange(len(budgets)) == turn)
        graph.replay()
        assert torch.equal(out, decode(inputs, case))


def test_a_budget_beyond_the_room_for_pages_reads_what_there_is_room_for() -> None:
    case = Case((3000, 517, 4096))
    inputs = Inputs(case)
    plain = decode(inputs, case)
    for launch in launches(case.group, case.head_size):
        assert torch.equal(decode(inputs.asking((1 << 30, 64, 4096)), case, launch), plain)
