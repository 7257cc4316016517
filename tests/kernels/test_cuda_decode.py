"""Decode steps over a selection on CUDA, against the torch references, on a GPU."""

import pytest
import torch
from sparse_kernels.batch import DecodeOutput, QueryTokens
from sparse_kernels.page_score.reference import score_pages as reference_scores
from sparse_kernels.page_topk.reference import select_pages as reference_selection
from sparse_kernels.sparse_attention.reference import attend_pages as reference_attention
from sparse_kernels.sparse_decode.reference import sparse_decode as reference_decode
from support.cuda import (
    BEYOND,
    CASES,
    ON_GPU,
    STD_WEIGHT,
    Case,
    Inputs,
    assert_close,
    assert_scores_close,
    checked_scores,
    decode,
    launches,
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


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    case = Case((3000, 517, 1, 4096, 700) * 13)
    inputs = Inputs(case)
    together = decode(inputs, case)
    for row in (0, 3, 42):
        assert torch.equal(decode(inputs.row(row), case)[0], together[row])


def test_a_graph_serves_other_lengths() -> None:
    case = Case((3000, 517, 4096))
    inputs = Inputs(case)
    decode(inputs, case)
    from sparse_kernels.sparse_decode import cuda

    out = torch.empty(inputs.query.shape, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.sparse_decode(*inputs.decode_arguments(case), DecodeOutput(out))
    for lengths in ((3000, 517, 4096), (1, 0, 2777), (600, 511, 4000)):
        inputs.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, decode(inputs, case))


@pytest.mark.parametrize("case", (CASES | BEYOND).values(), ids=CASES | BEYOND)
def test_scores_and_attention_equal_the_references(case: Case) -> None:
    from sparse_kernels.page_score import score_pages
    from sparse_kernels.sparse_attention import attend_pages

    if case.queries > 1 or 0 in case.contexts or case.eight_bit_cache:
        pytest.skip("these operations take one query token of each request, no padding and no scales")
    inputs = Inputs(case)
    grouped = inputs.query.unflatten(1, (case.num_kv_heads, case.group))
    lengths = inputs.seq_lens // case.page_size
    table = inputs.block_table.long()
    expected = reference_scores(grouped, inputs.statistics, table, lengths, STD_WEIGHT)
    actual = score_pages(grouped, inputs.statistics, inputs.block_table, lengths, STD_WEIGHT)
    assert_scores_close(actual, expected, lengths)
    pages = reference_selection(expected, lengths, case.k, 1, 1)
    tokens, cache, softmax = QueryTokens(grouped, table, inputs.seq_lens.long()), inputs.kv(case), inputs.softmax(case)
    actual = attend_pages(tokens, cache, pages, softmax)
    assert_close(actual, reference_attention(tokens, cache, pages, softmax))
