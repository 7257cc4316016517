"""Decode steps over a selection on CUDA, against the torch references, on a GPU."""

import pytest
import torch
from sparse_kernels.batch import DecodeOutput
from sparse_kernels.page_score.reference import score_pages as reference_scores
from sparse_kernels.sparse_decode.reference import sparse_decode as reference_decode
from support.cuda import (
    BEYOND,
    CASES,
    ON_GPU,
    STD_WEIGHT,
    Case,
    Inputs,
    assert_a_graph_serves,
    assert_close,
    assert_scores_close,
    checked_scores,
    decode,
    in_pieces,
    launches,
    split,
)

pytestmark = ON_GPU


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decode_equals_the_reference_whatever_the_launch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(case)
    expected = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    outputs = [decode(inputs, case, launch) for launch in launches(case.group, case.head_size)]
    monkeypatch.setattr("sparse_kernels.sparse_decode.reference.score_pages", checked_scores)
    reference_decode(*inputs.decode_arguments(case), DecodeOutput(expected))
    assert_close(outputs[0], expected)
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])
    if inputs.routing is not None:
        assert torch.equal(outputs[0] == 0, expected == 0)


FAR = (
    "ragged", "quarters", "sketch", "leveled, short", "leveled, fp8 cache", "bounds", "representatives", "fp8 cache",
    "three query tokens", "routed", "newest pages", "many pages", "heads of 80", "group of 17",
    "budget of 2,048 pages of 16",
)  # fmt: skip


@pytest.mark.parametrize("name", FAR)
def test_blocks_beyond_two_to_the_31_elements_are_read_as_near_ones(name: str) -> None:
    case = (CASES | BEYOND)[name]
    inputs = Inputs(case)
    far = inputs.in_last_blocks(case, 12 << 30)
    assert int(far.block_table.max()) * far.cache[0].numel() > 2**32
    with_one_launch = launches(case.group, case.head_size) if name in CASES else [None]
    for launch in with_one_launch:
        assert torch.equal(decode(far, case, launch), decode(inputs, case, launch))
    if case.skipped is None:
        assert torch.equal(in_pieces(far, case), in_pieces(inputs, case))
    if case.queries == 1:
        assert torch.equal(split(far, case), split(inputs, case))


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    case = Case((3000, 517, 1, 4096, 700) * 13)
    inputs = Inputs(case)
    together = decode(inputs, case)
    for row in (0, 3, 42):
        assert torch.equal(decode(inputs.row(row), case)[0], together[row])


def test_a_graph_serves_other_lengths() -> None:
    case = Case((3000, 517, 4096))
    assert_a_graph_serves(case, ((3000, 517, 4096), (1, 0, 2777), (600, 511, 4000)))


@pytest.mark.parametrize("case", (CASES | BEYOND).values(), ids=CASES | BEYOND)
def test_scores_equal_the_reference(case: Case) -> None:
    from sparse_kernels.page_score import score_pages

    if case.queries > 1 or 0 in case.contexts or case.eight_bit_cache:
        pytest.skip("these operations take one query token of each request, no padding and no scales")
    inputs = Inputs(case)
    grouped = inputs.query.unflatten(1, (case.num_kv_heads, case.group))
    lengths = inputs.seq_lens // case.page_size
    table = inputs.block_table.long()
    expected = reference_scores(grouped, inputs.statistics, table, lengths, STD_WEIGHT)
    actual = score_pages(grouped, inputs.statistics, inputs.block_table, lengths, STD_WEIGHT)
    assert_scores_close(actual, expected, lengths)


CHUNKED = {
    "ragged": Case((60003, 9001, 3000, 8192, 8191, 8200, 1, 0)),
    "pages of 32 in blocks of 64": Case((60003, 9001), page_size=32, k=32),
    "quarters, group of 3, heads of 80": Case((60003, 9001), kind="quarters", format="int4", group=3, head_size=80),
    "quarters, group of 16": Case((60003, 9001), kind="quarters", format="int4", group=16),
    "bf16 means, three query tokens": Case((60003, 9001), format="bf16", queries=3),
    "sketch, fp8 cache": Case((60003, 9001), kind="sketch", format="int2", block_size=256, eight_bit_cache=True),
    "routed": Case((60003, 9001, 3000), num_kv_heads=4, skipped=0.5),
    "short contexts whole": Case((60003, 9001, 3000), dense_tokens=10000),
}


@pytest.mark.parametrize("case", CHUNKED.values(), ids=CHUNKED)
def test_candidates_of_many_chunks_hold_the_best_pages(case: Case) -> None:
    from sparse_kernels.cuda.shared_memory import least_cluster
    from sparse_kernels.sparse_decode.launches import Launch

    inputs, least = Inputs(case), least_cluster(case.group, case.head_size)
    fused = Launch(True, least, 8, 1)
    expected = decode(inputs, case, fused)
    for most_fused, chunk in ((0, 32), (1024, 128), (1024, 1024)):
        for launch in (fused, Launch(True, 8, 16, 1)):
            assert torch.equal(decode(inputs, case, launch._replace(most_fused=most_fused, chunk=chunk)), expected)


def test_equal_scores_in_several_chunks_are_taken_in_the_order_of_the_text() -> None:
    from sparse_kernels.sparse_decode.launches import Launch

    case = Case((20003, 8000))
    inputs = Inputs(case)
    inputs.query = torch.zeros_like(inputs.query)
    expected = decode(inputs, case, Launch(True, 1, 8, 1))
    found = decode(inputs, case, Launch(True, 1, 8, 1, most_fused=0, chunk=64))
    assert torch.equal(found, expected)
