"""Requests with their own budgets or coverage."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sparse_kernels.page_coverage import count_rows
from support.cuda_layer import BUDGET, HEADS, KINDS, asking, budgets_of, common_metadata, plan_of, run

from vllm_sparse_plugin.attention.cuda import layer as layer_module
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.requests.arguments import EVERY_PAGE
from vllm_sparse_plugin.requests.limits import StepLimits


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
    builder.limits = budgets_of(plain.selector.name(), *KINDS, compaction=None)
    layer.bind(replace(plain, most_pages=1024))
    output, _, metadata = run(layer, builder, common)
    (decode,) = metadata.decode
    assert decode.budgets.tolist() == [8, 16, 8, 3, 8]
    assert decode.dense.tolist() == [False, False, True, False, False]
    for request, alone in expected.items():
        assert torch.equal(output[request * new : (request + 1) * new], alone)


def test_a_server_with_a_coverage_serves_budgets_beside_it(layer, builder):
    """Each request reads what `count_rows` returns, independent of other requests."""
    settings = {"selection": {"coverage": 0.6, "min_budget_tokens": 32, "max_budget_tokens": 512}}
    kinds = (None, {"sparse_budget_tokens": 128}, {"sparse": "dense"}, {"sparse_coverage": 0.9})
    config = resolve(BUDGET | settings, "unique")
    counters = torch.zeros(HEADS, 4, dtype=torch.int64)
    layer.bind(replace(plan_of(config), most_pages=1024, counters=counters))
    counted = []

    def counting(batch, *given):
        found = count_rows(batch, *given)
        counted.append(found.budgets)
        return found

    with mock.patch.object(layer_module, "count_rows", counting):
        builder.limits = StepLimits(config, asking(*kinds), 16, torch.device("cpu"))
        common = common_metadata([2] * 4, [900, 700, 800, 600], [False] * 4)
        output, dense, metadata = run(layer, builder, common)
    (decode,) = metadata.decode
    assert decode.budgets is None
    assert decode.limits.share.tolist() == pytest.approx([0.6, 0, 0.6, 0.9])
    assert decode.limits.least.tolist() == [4, 16, 4, 4]
    assert decode.limits.most.tolist() == [64, 16, 64, 64]
    (counts,) = counted
    assert counts[2:4].eq(16).all()
    assert 4 < counts[:2].min() < counts[6:].min()
    torch.testing.assert_close(output[4:6], dense[4:6], atol=2e-2, rtol=2e-2)
    close = [torch.allclose(mine, whole, atol=2e-2, rtol=2e-2) for mine, whole in zip(output, dense, strict=True)]
    assert close == [False] * 4 + [True] * 2 + [False] * 2
    # Three requests of two tokens each are counted.
    assert counters[:, 0].tolist() == [6] * HEADS
    assert counters[:, 3].tolist() == [899 + 900 + 699 + 700 + 599 + 600] * HEADS
    assert counters[0, 1] == int(counts[[0, 1, 2, 3, 6, 7], 0].sum())


def test_a_coverage_is_counted_for_the_largest_number_of_pages_that_a_row_may_read(layer, builder):
    """It decides how a GPU counts: one way finds at most 1,024 pages."""
    settings = {"selection": {"coverage": 0.6, "min_budget_tokens": 32, "max_budget_tokens": 16384}}
    config = resolve(BUDGET | settings, "unique")
    layer.bind(replace(plan_of(config), most_pages=2048))
    selections = []

    def counting(batch, cache, selection, *given):
        selections.append(selection)
        return count_rows(batch, cache, selection, *given)

    with mock.patch.object(layer_module, "count_rows", counting):
        builder.limits = StepLimits(config, None, 16, torch.device("cpu"))
        _, _, metadata = run(layer, builder, common_metadata([1], [900], [False]))
    assert metadata.decode[0].limits.most.tolist() == [2048]
    assert [selection.k for selection in selections] == [2048]


def test_budgets_lie_in_a_tensor_that_stays_and_is_written_when_they_change(builder, monkeypatch):
    written: list[int] = []
    builder.limits = budgets_of("unique", *KINDS)
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
    builder.limits._requested._rows = asking(None, None, {"sparse_budget_tokens": 8192})
    (later,) = builder.build(0, common_metadata([1] * 3, [300] * 3, [False] * 3)).decode
    assert later.budgets.tolist() == [8, 8, 1024]
    assert not later.dense.any()
    assert len({decode.budgets.data_ptr() for decode in (first, same, mixed, later)}) == 1
    builder.limits._requested._rows = None
    assert builder.build(0, common_metadata([1] * 3, [300] * 3, [False] * 3)).decode[0].budgets.tolist() == [8] * 3


def test_runs_of_a_step_have_their_own_budgets(layer, builder):
    builder.limits = budgets_of("unique", *KINDS[:3])
    common = common_metadata([4, 1, 70], [900, 800, 600], [False, False, True])
    _, _, metadata = run(layer, builder, common)
    assert [decode.budgets.tolist() for decode in metadata.decode] == [[8], [16]]


def test_what_is_counted_of_reads_are_the_budgets_of_the_requests(builder):
    seen = []
    builder.reads = SimpleNamespace(step=lambda common, longest, budgets, log, left_out: seen.append(budgets))
    builder.build(0, common_metadata([1, 1], [300, 500], [False, False]))
    builder.limits = budgets_of("unique", *KINDS[:3])
    builder.build(0, common_metadata([1] * 4, [300] * 4, [False] * 4))
    assert seen[0] is None
    assert seen[1].tolist() == [8, 16, EVERY_PAGE, 8]


@pytest.mark.parametrize("stopping", [None, {}])
def test_where_no_request_has_a_budget_all_launches_are_those_of_the_settings(builder, stopping):
    builder.limits = budgets_of("unique", None, {"sparse": "dense"}, stopping=stopping)
    (decode,) = builder.build(0, common_metadata([1, 1], [300, 500], [False, False])).decode
    assert (decode.budgets is None) == (stopping is not None)
    assert decode.dense.tolist() == [False, True]
