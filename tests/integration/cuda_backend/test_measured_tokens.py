"""Tokens that are sampled to measure quality."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sparse_kernels.batch import Softmax
from sparse_kernels.group_routing import GroupRouting
from support.cuda_layer import (
    BLOCK,
    COVERED,
    GROUP,
    HEADS,
    SCALE,
    SCALES,
    SIZE,
    common_metadata,
    limits_of_mixed_requests,
    plan_of,
    run,
)
from support.logs import said
from support.paged import dense_attention

from vllm_sparse_plugin.attention.cuda import start_up
from vllm_sparse_plugin.attention.metering import Meter
from vllm_sparse_plugin.config import resolve
from vllm_sparse_plugin.metrics import sampling
from vllm_sparse_plugin.metrics.live import LayerQuality
from vllm_sparse_plugin.metrics.sampling import Sample


def test_a_sampled_token_is_measured(layer, builder, monkeypatch):
    recorded = []
    monkeypatch.setattr(LayerQuality, "record", lambda self, *arguments: recorded.append(arguments))
    layer.bind(replace(layer.plan, quality=LayerQuality(torch.zeros(HEADS, 5, dtype=torch.int64), 0, 2)))
    lengths = [300, 40, 500, 600, 200]
    common = common_metadata([4, 4, 1, 1, 70], lengths, [False, False, False, True, True])
    # With asynchronous speculation the host knows only upper bounds.
    common = common.replace(seq_lens_cpu_upper_bound=torch.tensor([length + 2 for length in lengths]))
    builder.selector, builder.dense_tokens = layer.plan.selector, 40
    # The first request's tokens and that of the third: the second fits the budget, the fourth is part of a prompt.
    for number, (index, request, context) in enumerate(
        [(0, 0, 297), (1, 0, 298), (2, 0, 299), (3, 0, 300), (8, 2, 500), (0, 0, 297)]
    ):
        builder.meter.sampler.sample = Sample(number, 2)
        recorded.clear()
        output, _, metadata = run(layer, builder, common)
        assert metadata.sampled.token == index
        ((token, longest, _, pages, softmax, selection, masses, left_out),) = recorded
        assert masses is None
        assert not left_out.any()
        assert token.context_lens.tolist() == [context]
        assert longest == context + 2
        assert softmax == Softmax(SCALE)
        assert selection == layer.plan.selector.page_selection()
        blocks = token.block_table[0]
        assert torch.equal(blocks, common.block_table_tensor[request].long()[: len(blocks)])
        assert token.query.shape == (1, HEADS, GROUP, SIZE)
        assert pages.shape == (1, HEADS, 8)
        assert pages[..., 0].eq(0).all()
        assert pages[..., -1].eq(context // 8 - 1).all()
    # Another layer is measured, or none.
    for sample in (Sample(0, 1), None):
        builder.meter.sampler.sample = sample
        recorded.clear()
        again, _, _ = run(layer, builder, common)
        assert recorded == []
        assert torch.equal(again, output)


def metered(layer, builder, number: int = 0) -> torch.Tensor:
    """Measures the given sampled token in a step; returns the counts of the layer."""
    counts = torch.zeros(HEADS, 5, dtype=torch.int64)
    layer.bind(replace(layer.plan, quality=LayerQuality(counts, 0, 1)))
    builder.selector, builder.dense_tokens = layer.plan.selector, layer.plan.dense_tokens
    builder.meter.sampler.sample = Sample(number, 0)
    return counts


def test_under_a_coverage_a_sampled_token_is_measured_by_what_it_read(layer, builder, monkeypatch):
    """The coverage comes from the server or from the request. Budgets of other requests still apply."""
    recorded = []
    monkeypatch.setattr(LayerQuality, "record", lambda self, *arguments: recorded.append(arguments))
    config = resolve(COVERED, "unique")
    layer.bind(replace(plan_of(config), most_pages=1024))
    builder.limits = limits_of_mixed_requests(config)
    found = {}
    # Tokens of the third request attend to everything. The last context fits the smallest number of pages.
    lengths = [900, 700, 800, 600, 33]
    for number in range(6):
        metered(layer, builder, number)
        recorded.clear()
        output, _, metadata = run(layer, builder, common_metadata([2] * 5, lengths, [False] * 5))
        ((token, _, cache, pages, softmax, _, _, left_out),) = recorded
        index, context = metadata.sampled.token, int(token.context_lens)
        assert not left_out.any()
        assert context == lengths[index // 2] - 1 + index % 2
        found[index] = (pages >= 0).sum(dim=-1)[0].tolist()
        rows = (part.gather_blocks(token.block_table[0])[:, :context] for part in (cache.keys, cache.values))
        keys, values = (part.transpose(0, 1) for part in rows)
        # The recorded pages give the output of attention.
        visible = torch.zeros(HEADS, context, dtype=torch.bool)
        visible[:, context // 8 * 8 :] = True
        for head in range(HEADS):
            for page in pages[0, head][pages[0, head] >= 0].tolist():
                visible[head, page * 8 : page * 8 + 8] = True
        exact = dense_attention(token.query[0], keys, values, softmax.scale, visible)
        torch.testing.assert_close(output[index].double(), exact, atol=2e-2, rtol=2e-2)
    assert sorted(found) == [0, 1, 2, 3, 6, 7]
    assert found[2] == found[3] == [16, 16]
    assert 4 < min(found[0] + found[1]) < min(found[6] + found[7]) < 64


def test_a_group_that_is_skipped_is_not_measured(layer, builder):
    common = common_metadata([1], [300], [False])
    first = GroupRouting(torch.tensor([[-2.0, 0, 0, 0], [2.0, 0, 0, 0]]))
    layer.bind(replace(layer.plan, routing=first))
    counts = metered(layer, builder)
    run(layer, builder, common)
    assert counts[:, 4].tolist() == [0, 1]
    assert counts[0].eq(0).all()


def test_a_context_that_bounds_took_for_a_longer_one_is_not_measured(layer, builder):
    """With asynchronous speculation the host knows only upper bounds. Contexts attended whole omit nothing."""
    for length, measured in ((300, 0), (301, 1)):
        common = common_metadata([1], [length], [False])
        common = common.replace(seq_lens_cpu_upper_bound=torch.tensor([304]))
        layer.bind(replace(layer.plan, dense_tokens=300))
        counts = metered(layer, builder)
        _, _, metadata = run(layer, builder, common)
        assert metadata.sampled is not None
        assert counts[:, 4].tolist() == [measured] * HEADS


@pytest.mark.parametrize("where", ["record", "masses_of"])
def test_what_fails_while_measuring_leaves_the_step_as_it_is(layer, builder, monkeypatch, where):
    def fail(*arguments: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(sampling, "_reported", set())
    warnings = said(monkeypatch, "vllm.vllm_sparse_plugin.metrics.sampling", "warning")
    common = common_metadata([4, 1, 70], [300, 500, 200], [False, False, True])
    plain, _, _ = run(layer, builder, common)
    counts = metered(layer, builder)
    monkeypatch.setattr(*((LayerQuality, where) if where == "record" else (Meter, where)), fail)
    for _ in range(2):
        output, _, _ = run(layer, builder, common)
        assert torch.equal(output, plain)
    assert counts.eq(0).all()
    (line,) = warnings
    assert line.endswith("a token cannot be measured (RuntimeError: no such luck)")


@pytest.mark.parametrize("layer", ["unique", "quest", "streaming_llm"], indirect=True)
def test_measuring_is_warmed_up_and_leaves_no_trace(layer, monkeypatch):
    monkeypatch.setattr(sampling, "_reported", set())
    warnings = said(monkeypatch, "vllm.vllm_sparse_plugin.metrics.sampling", "warning")
    measured = []
    record = LayerQuality.record
    monkeypatch.setattr(
        LayerQuality, "record", lambda self, *given: measured.append(record(self, *given)) or self.counts[0, 4].item()
    )
    counts = torch.zeros(HEADS, 5, dtype=torch.int64)
    layer.bind(replace(layer.plan, quality=LayerQuality(counts, 3, 8)))
    layer.num_queries_per_kv = GROUP
    rows = BLOCK + (layer.plan.statistics.rows(BLOCK) if layer.plan.statistics else 0)
    module = SimpleNamespace(**vars(SCALES), impl=layer)
    start_up.warm_up_meter(module, SimpleNamespace(num_states=rows, dtype=torch.bfloat16), 1000, torch.device("cpu"))
    assert warnings == []
    assert len(measured) == 1
    assert counts.eq(0).all()
    assert layer.bound_cache is None
