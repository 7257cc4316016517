"""Selections and contexts that need several launches, on a GPU."""

import pytest
import torch
from sparse_kernels.batch import DecodeOutput
from sparse_kernels.sparse_decode.reference import sparse_decode as reference_decode
from support.cuda import (
    BEYOND,
    CASES,
    LONG,
    ON_GPU,
    Case,
    Inputs,
    assert_a_graph_serves,
    assert_close,
    checked_scores,
    decode,
    in_pieces,
)

pytestmark = ON_GPU


PIECES = BEYOND | {
    name: CASES[name]
    for name in (
        "ragged", "page boundaries", "multi-head, small blocks", "group of 3, pages of 32", "heads of 256", "quarters",
        "fp8 cache", "padded requests", "three query tokens", "softcap", "short contexts whole", "newest pages",
        "routed", "everything skipped", "heads of 80, fp8 cache", "heads of 112, group of 16, bf16 means",
        "heads of 192, quarters, one head",
    )
}  # fmt: skip


@pytest.mark.parametrize("case", PIECES.values(), ids=PIECES)
def test_decode_in_pieces_equals_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(case)
    expected = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    output = in_pieces(inputs, case)
    counts = None if inputs.routing is None else inputs.routing.counts.clone()
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    reference_decode(*inputs.decode_arguments(case), DecodeOutput(expected))
    assert_close(output, expected)
    if inputs.routing is not None:
        assert torch.equal(output == 0, expected == 0)
        # The reference has counted the same.
        assert torch.equal(inputs.routing.counts, 2 * counts)
    if case in BEYOND.values():
        assert torch.equal(decode(inputs, case), output), "one launch serves it"


@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_contexts_of_any_length_equal_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(case)
    expected = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    outputs = decode(inputs, case), in_pieces(inputs, case)
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    reference_decode(*inputs.decode_arguments(case), DecodeOutput(expected))
    for output in outputs:
        assert_close(output, expected)


@pytest.mark.parametrize("name", ["budget of 2,048 pages", "group of 32, routed", "budget of 2,048 pages, routed"])
def test_pieces_of_a_request_do_not_depend_on_its_neighbours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BEYOND[name]
    inputs = Inputs(case)
    together = in_pieces(inputs, case)
    for row in range(len(case.contexts)):
        assert torch.equal(in_pieces(inputs.row(row), case)[0], together[row])
    # One request at a time, and one thread block for all pieces of a row.
    monkeypatch.setattr("sparse_kernels.sparse_decode.scratch.PIECES_BYTES", 1)
    monkeypatch.setattr("sparse_kernels.split_attention.cuda._WAVES", 0)
    assert torch.equal(in_pieces(inputs, case), together)


@pytest.mark.parametrize("name", ["budget of 2,048 pages", "group of 32, routed", "131,072 pages and one"])
def test_a_graph_of_several_launches_serves_other_lengths(name: str) -> None:
    case = (BEYOND | LONG)[name]
    assert_a_graph_serves(case, tuple(tuple(max(0, each - less) for each in case.contexts) for less in (0, 1, 777)))
