"""Requests with their own budgets."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.cuda_layer import KINDS, asking, budgets_of, common_metadata, run

from vllm_sparse_plugin.requests.arguments import EVERY_PAGE


@pytest.mark.parametrize("layer", ["unique", "quest", "streaming_llm"], indirect=True)
@pytest.mark.parametrize("new", [1, 2])
def test_requests_of_all_kinds_read_what_they_say(layer, builder, new):
    """Each request reads what a layer with its budget as setting reads. Other requests of the batch do not matter."""
    lengths = [900, 700, 800, 600, 300]
    common = common_metadata([new] * 5, lengths, [False] * 5)
    plain = layer.plan
    expected = {}
    for request, tokens in enumerate((64, 128, None, 24, 64)):
        selector = plain.selector.model_copy(update={"budget_tokens": tokens or 1024})
        layer.bind(replace(plain, selector=selector))
        rows = slice(request * new, (request + 1) * new)
        expected[request], dense = (part[rows] for part in run(layer, builder, common)[:2])
        assert torch.allclose(expected[request], dense, atol=2e-2, rtol=2e-2) == (tokens is None)
    builder.budgets = budgets_of(plain.selector.name(), *KINDS, compaction=None)
    layer.bind(replace(plain, most_pages=1024))
    output, _, metadata = run(layer, builder, common)
    (decode,) = metadata.decode
    assert decode.budgets.tolist() == [8, 16, 8, 3, 8]
    assert decode.dense.tolist() == [False, False, True, False, False]
    for request, alone in expected.items():
        assert torch.equal(output[request * new : (request + 1) * new], alone)


def test_budgets_lie_in_a_tensor_that_stays_and_is_written_when_they_change(builder, monkeypatch):
    written: list[int] = []
    builder.budgets = budgets_of("unique", *KINDS)
    copied = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *given, **more: written.append(1) or copied(self, *given))
    (first,) = builder.build(0, common_metadata([1] * 6, [300] * 6, [False] * 6)).decode
    # The last row is padding.
    assert first.budgets.tolist() == [8, 16, 8, 3, 8, 8]
    assert first.dense.tolist() == [False, False, True, False, False, False]
    assert len(written) == 2
    (same,) = builder.build(0, common_metadata([1] * 5, [300] * 5, [False] * 5)).decode
    assert len(written) == 2
    # A prompt's single tokens are dense as well.
    (mixed,) = builder.build(0, common_metadata([1] * 5, [300] * 5, [True, False, True, False, False])).decode
    assert mixed.dense.tolist() == [True, False, True, False, False]
    builder.budgets._rows = asking(None, None, {"sparse_budget_tokens": 8192})
    (later,) = builder.build(0, common_metadata([1] * 3, [300] * 3, [False] * 3)).decode
    assert later.budgets.tolist() == [8, 8, 1024]
    assert not later.dense.any()
    assert len({decode.budgets.data_ptr() for decode in (first, same, mixed, later)}) == 1
    builder.budgets._rows = None
    assert builder.build(0, common_metadata([1] * 3, [300] * 3, [False] * 3)).decode[0].budgets.tolist() == [8] * 3


def test_runs_of_a_step_have_their_own_budgets(layer, builder):
    builder.budgets = budgets_of("unique", *KINDS[:3])
    common = common_metadata([4, 1, 70], [900, 800, 600], [False, False, True])
    _, _, metadata = run(layer, builder, common)
    assert [decode.budgets.tolist() for decode in metadata.decode] == [[8], [16]]


def test_what_is_counted_of_reads_are_the_budgets_of_the_requests(builder):
    seen = []
    builder.reads = SimpleNamespace(step=lambda common, longest, budgets, log, left_out: seen.append(budgets))
    builder.build(0, common_metadata([1, 1], [300, 500], [False, False]))
    builder.budgets = budgets_of("unique", *KINDS[:3])
    builder.build(0, common_metadata([1] * 4, [300] * 4, [False] * 4))
    assert seen[0] is None
    assert seen[1].tolist() == [8, 16, EVERY_PAGE, 8]


@pytest.mark.parametrize("stopping", [None, {}])
def test_where_no_request_has_a_budget_all_launches_are_those_of_the_settings(builder, stopping):
    builder.budgets = budgets_of("unique", None, {"sparse": "dense"}, stopping=stopping)
    (decode,) = builder.build(0, common_metadata([1, 1], [300, 500], [False, False])).decode
    assert (decode.budgets is None) == (stopping is not None)
    assert decode.dense.tolist() == [False, True]
