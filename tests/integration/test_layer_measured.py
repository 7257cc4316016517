"""Measured tokens of one attention layer."""

import pytest
import torch
from support.layer import SMALL, LayerHarness, Request
from support.paged import assert_as_accurate, dense_attention

from vllm_sparse_plugin.metrics import request_log
from vllm_sparse_plugin.metrics.live import LayerQuality
from vllm_sparse_plugin.metrics.sampling import Sample
from vllm_sparse_plugin.tools.diagnostics.layer import LayerBatch

SAMPLED = {**SMALL, "diagnostics": {"sample_every": 2}}


@pytest.mark.parametrize("backend", ["unique", "quest", "streaming_llm"])
def test_sampled_steps_measure_what_was_read(model, backend, monkeypatch):
    recorded = []
    monkeypatch.setattr(LayerQuality, "record", lambda self, *arguments: recorded.append((self, arguments)))
    settings, sinks = SAMPLED | {"compaction": None}, torch.randn(8).bfloat16()
    harness = LayerHarness(model, settings=settings, backend=backend, layer_index=3, sinks=sinks)
    requests = [harness.request(n) for n in (200, 20, 333)]
    harness.step([(request, n) for request, n in zip(requests, (200, 20, 333), strict=True)])
    outputs = []
    # Two requests decode sparsely; one of them is measured in the second step, the other in the fourth.
    for sample in (None, Sample(3, 0), None, Sample(2, 0)):
        harness.builder.meter.sampler.sample = sample
        outputs.append(harness.step([(request, 1) for request in requests]))
    assert len(recorded) == 2
    for (quality, arguments), index, step in zip(recorded, (2, 0), (1, 3), strict=True):
        assert quality.counts is harness.builder.counts[-1].of_layers[0]
        token, longest, _, pages, softmax, selection, *_ = arguments
        assert longest == int(token.context_lens)
        assert selection == harness.selection.page_selection()
        query, table, context = token.query, token.block_table[0], int(token.context_lens)
        scale, sinks, softcap = softmax.scale, softmax.sink_logits, softmax.softcap
        request = requests[index]
        assert context == len(request.keys) - (3 - step)
        blocks = table[torch.arange(-(-context // harness.block_size))]
        assert blocks.tolist() == request.blocks[: len(blocks)]
        seen = torch.zeros(2, context, dtype=torch.bool)
        seen[:, context // 8 * 8 :] = True
        for head in range(2):
            for page in pages[0, head].tolist():
                seen[head, page * 8 : page * 8 + 8] = True
        plain = request.keys[:context], request.values[:context]
        exact = dense_attention(query[0], *plain, scale, seen, sinks, softcap)
        assert_as_accurate(outputs[step][index][0], exact, exact.float())


def test_a_step_measures_some_layers_and_bits_stay(model, monkeypatch):
    """Layers that a step does not measure give the same bits as a measured layer."""
    outputs, measured = [], []
    for sample in (None, Sample(0, 0), Sample(0, 1)):
        harness = LayerHarness(model, settings=SAMPLED, seed=3)
        quality = harness.layer.impl.plan.quality
        quality.stride = 2
        request = harness.request(200)
        harness.step([(request, 200)])
        harness.builder.meter.sampler.sample = sample
        outputs.append(harness.step([(request, 1)])[0])
        measured.append(quality.counts[:, -1].tolist())
    assert measured == [[0, 0], [1, 1], [0, 0]]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def measured_of(harness: LayerHarness, sample: Sample, batch: list[tuple[Request, int]]) -> list[list[int]]:
    """The counts of one measured step: for each KV head the number of measurements, then its measures in units."""
    counts = harness.layer.impl.plan.quality.counts.zero_()
    harness.builder.meter.sampler.sample = sample
    harness.step(batch)
    harness.builder.meter.sampler.sample = None
    return counts.tolist()


def test_skipped_groups_and_tokens_that_leave_nothing_out_are_not_measured(model):
    routing = {"threshold": [[-2.0, 2.0]] * 8, "dense_layers": 0, "accept": "uncalibrated"}
    harness = LayerHarness(model, settings=SAMPLED | {"routing": routing})
    short, long = harness.request(60), harness.request(300)
    harness.step([(short, 60), (long, 300)])
    for number in range(4):
        skipped, read = measured_of(harness, Sample(number, 0), [(short, 1), (long, 1)])
        assert skipped == [0] * 5
        # The short context fits the budget, so it is read whole and is not measured.
        assert read[4] == 1
        assert read[0] < 1 << 30
    assert measured_of(harness, Sample(0, 0), [(short, 1)]) == [[0] * 5] * 2


def test_under_a_coverage_what_is_measured_was_read(model):
    """The estimated share of the pages read reaches the request's coverage."""
    masses = {}
    for share in (0.5, 0.9):
        harness = LayerHarness(model, settings=SAMPLED, seed=4)
        request = harness.request(700)
        request.arguments = {"sparse_coverage": share}
        harness.step([(request, 700)])
        for head in measured_of(harness, Sample(0, 0), [(request, 1)]):
            assert head[4] == 1
            masses.setdefault(share, []).append(head[3] / (1 << 30))
        assert all(share - 1e-5 <= mass < share + 0.1 for mass in masses[share])


def test_chunks_of_a_prompt_are_not_measured(model):
    harness = LayerHarness(model, settings=SAMPLED)
    request = harness.request(300)
    harness.step([(request, 299)])
    # The last token of a prompt is a single token, and attends to everything.
    assert measured_of(harness, Sample(0, 0), [(request, 1)]) == [[0] * 5] * 2
    assert [head[4] for head in measured_of(harness, Sample(0, 0), [(request, 1)])] == [1, 1]


def test_under_compaction_what_is_measured_is_what_the_cache_keeps(model, monkeypatch):
    recorded = []
    monkeypatch.setattr(LayerQuality, "record", lambda self, *arguments: recorded.append(arguments))
    compaction = {"method": "snapkv", "budget_tokens": 256, "min_context_tokens": 0}
    harness = LayerHarness(model, settings=SAMPLED | {"compaction": compaction})
    request = harness.request(600)
    harness.step([(request, 600)])
    measured_of(harness, Sample(0, 0), [(request, 1)])
    ((token, longest, *_),) = recorded
    # Whole blocks are omitted from the table. Tokens after the prompt stay.
    assert longest == int(token.context_lens) < 600
    assert int(token.context_lens) % harness.block_size == 601 % harness.block_size


def test_a_log_has_what_each_request_reads_and_the_mass_of_sampled_tokens(model, monkeypatch):
    common = LayerBatch.common
    # As vLLM's model runners do.
    monkeypatch.setattr(LayerBatch, "common", lambda self: common(self).replace(seq_lens_cpu_upper_bound=self.seq_lens))
    harness = LayerHarness(model, settings=SMALL | {"diagnostics": {"log_requests": True}}, seed=4)
    requests = [harness.request(n) for n in (200, 333, 300)]
    # Lengths do not determine what a coverage reads.
    requests[2].arguments = {"sparse_coverage": 0.9}
    harness.step([(request, request.prompt_tokens) for request in requests])
    for sample in (Sample(1, 0), None):
        harness.builder.meter.sampler.sample = sample
        harness.step([(request, 1) for request in requests])
    log = request_log.of_runner(harness)
    assert requests[2].name not in log._requests
    first, second = (log._requests[request.name] for request in requests[:2])
    budget = harness.selection.budget_tokens
    assert (first.tokens_read, first.tokens_in_context) == (2 * budget + 201 % 8 + 202 % 8, 201 + 202)
    assert (second.tokens_read, second.tokens_in_context) == (2 * budget + 334 % 8 + 335 % 8, 334 + 335)
    assert first.mass is None
    counts = harness.layer.impl.plan.quality.counts
    mass = counts[:, 3].double().sum() / (1 << 30)
    torch.testing.assert_close(second.mass.double(), torch.stack([mass, torch.tensor(2.0)]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("off", [{"diagnostics": {"sample_every": 0}}, {"lossless": {"draft_tokens": 2}}], ids=str)
def test_without_sampling_no_step_measures(model, off):
    harness = LayerHarness(model, settings=SMALL | off)
    assert harness.layer.impl.plan.quality is None
    assert harness.builder.meter.sampler.every == 0
