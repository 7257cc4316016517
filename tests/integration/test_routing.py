"""Routing of KV groups in one attention layer, with vLLM's metadata and KV-cache update."""

import pytest
import torch
from prometheus_client import CollectorRegistry
from support.layer import LayerHarness, Request
from support.paged import assert_as_accurate

from vllm_sparse_plugin.errors import ConfigurationError
from vllm_sparse_plugin.metrics import live

POLICIES = ["dense", "unique", "quest", "streaming_llm"]
HEADS = 2


def settings_of(backend: str, threshold: object, **more: object) -> dict:
    selection = {} if backend == "dense" else {"selection": {"budget_tokens": 64}}
    routing = None if threshold is None else {"threshold": threshold, "dense_layers": 2, "accept": "uncalibrated"}
    return {**selection, "min_context_tokens": 100, "routing": routing, **more}


def scores_of(request: Request) -> torch.Tensor:
    """Mean cosine of each group of the latest step's tokens with token 0's key, `[tokens, num_kv_heads]`."""
    query = request.fresh.unflatten(1, (HEADS, -1)).double()
    anchor = request.keys[0].double()[None, :, None].expand_as(query)
    return torch.nn.functional.cosine_similarity(query, anchor, dim=-1).mean(dim=-1)


def decoded(model: str, backend: str, routing: object, steps: int = 12, layer_index: int = 2) -> list[tuple]:
    """Outputs and scores of three requests that decode together; the last is below the shortest routed context."""
    harness = LayerHarness(model, settings=settings_of(backend, routing), backend=backend, layer_index=layer_index)
    requests = [harness.request(n) for n in (300, 150, 30)]
    harness.step([(request, request.prompt_tokens) for request in requests])
    found = []
    for _ in range(steps):
        outputs = harness.step([(request, 1) for request in requests])
        scores = [scores_of(request)[0] for request in requests]
        exact = [harness.dense(request) for request in requests]
        found += [
            (which, output[0].unflatten(0, (HEADS, -1)), score, dense.unflatten(0, (HEADS, -1)))
            for which, (output, score, dense) in enumerate(zip(outputs, scores, exact, strict=True))
        ]
    return found


@pytest.mark.parametrize("backend", POLICIES)
def test_skipped_groups_are_zero_and_others_keep_their_bits(model, backend):
    # Random queries: a threshold of 0 skips half of the groups.
    plain, routed = decoded(model, backend, 1.5), decoded(model, backend, 0.0)
    if backend != "dense":  # without routing it is vLLM's own attention
        for (_, ours, *_), (_, unrouted, *_) in zip(plain, decoded(model, backend, None), strict=True):
            assert torch.equal(ours, unrouted)
    skips = 0
    for (which, before, _, _), (_, after, scores, _) in zip(plain, routed, strict=True):
        skipped = (scores >= 0) & (which < 2)
        skips += int(skipped.sum())
        assert after[skipped].eq(0).all()
        assert torch.equal(after[~skipped], before[~skipped])
        assert before.any(dim=-1).all()
    assert 12 < skips < 36


def test_active_groups_of_a_dense_policy_attend_to_everything(model):
    for which, output, scores, exact in decoded(model, "dense", 0.0):
        active = scores < 0
        if which < 2 and active.any():
            assert_as_accurate(output[active], exact[active], exact[active].float())


@pytest.mark.parametrize("backend", ["dense", "unique"])
def test_leading_layers_and_no_routing_are_as_without_it(model, backend):
    def run(routing: dict | None, layer_index: int) -> list[torch.Tensor]:
        settings = {**settings_of(backend, -2.0), "routing": routing}
        harness = LayerHarness(model, settings=settings, backend=backend, layer_index=layer_index)
        request = harness.request(300)
        harness.step([(request, 300)])
        return [harness.step([(request, 1)])[0] for _ in range(3)]

    everything = {"threshold": -2.0, "dense_layers": 2, "accept": "uncalibrated"}
    for layer_index in (0, 1):
        for ours, plain in zip(run(everything, layer_index), run(None, layer_index), strict=True):
            assert torch.equal(ours, plain)
    assert not any(output.any() for output in run(everything, 2))
    assert not any(output.any() for output in run({**everything, "dense_layers": 0}, 0))


def test_a_short_budget_does_not_exempt_from_routing(model):
    """Contexts between the shortest context and the budget are read whole, but routed."""
    settings = settings_of("unique", 0.0, selection={"budget_tokens": 512})
    harness = LayerHarness(model, settings=settings, layer_index=2)
    request = harness.request(200)
    harness.step([(request, 200)])
    for _ in range(8):
        (output,) = harness.step([(request, 1)])
        active = scores_of(request)[0] < 0
        exact = harness.dense(request).unflatten(0, (HEADS, -1))
        found = output[0].unflatten(0, (HEADS, -1))
        assert found[~active].eq(0).all()
        if active.any():
            assert_as_accurate(found[active], exact[active], exact[active].float())


@pytest.mark.parametrize("backend", POLICIES)
def test_groups_that_are_left_stop_as_without_routing_and_they_alone_count(model, backend):
    """Tests single steps within the budget (200 tokens) and beyond it (1003)."""
    stopping = {"scale_tolerance": 0.2, "direction_tolerance": 0.05, "patience": 1, "block_tokens": 64}
    found = {}
    for threshold in (1.5, 0.0):
        settings = settings_of(backend, threshold, stopping=stopping)
        if backend != "dense":
            settings["selection"] = {"budget_tokens": 512}
        harness = LayerHarness(model, settings=settings, backend=backend, layer_index=2)
        requests = [harness.request(n) for n in (1003, 200)]
        harness.step([(request, request.prompt_tokens) for request in requests])
        found[threshold] = []
        counters = harness.layer.impl.plan.counters
        assert not counters.any(), "the token that compiles the kernels must not be counted"
        for _ in range(8):
            for request in requests:
                before = counters.clone()
                (output,) = harness.step([(request, 1)])
                skipped = scores_of(request)[0] >= threshold
                found[threshold].append((output[0].unflatten(0, (HEADS, -1)), skipped, counters - before))
                within = backend != "dense" and request is requests[1]
                assert (counters - before)[:, 0].tolist() == (~skipped & (not within)).long().tolist()
    pages, stops = 0, 0
    for (plain, _, all_counts), (routed, skipped, counts) in zip(*found.values(), strict=True):
        assert torch.equal(routed, plain.masked_fill(skipped[:, None, None], 0))
        assert torch.equal(counts, all_counts.masked_fill(skipped[:, None], 0))
        pages, stops = pages + int(all_counts[:, 3].sum()), stops + int(all_counts[:, 2].sum())
    assert 0 < stops < pages


def test_layers_and_heads_have_their_thresholds(model):
    skipped = {}
    thresholds = [[2, 2], [2, 2], [-2, 2], [2, -2], *[[2, 2]] * 4]
    for layer_index in (2, 3, 4):
        settings = settings_of("dense", thresholds)
        harness = LayerHarness(model, settings=settings, backend="dense", layer_index=layer_index)
        request = harness.request(300)
        harness.step([(request, 300)])
        (output,) = harness.step([(request, 1)])
        skipped[layer_index] = [not head.any() for head in output[0].unflatten(0, (HEADS, -1))]
    assert skipped == {2: [True, False], 3: [False, True], 4: [False, False]}


def test_prompts_are_not_routed(model):
    harness = LayerHarness(model, settings=settings_of("dense", -2.0), backend="dense", layer_index=2)
    request = harness.request(300)
    harness.step([(request, 200)])
    (output,) = harness.step([(request, 99)])
    assert output.any(dim=-1).all()
    # The last token of a prompt is a prompt token even if it is alone in its step.
    (output,) = harness.step([(request, 1)])
    assert output.any(dim=-1).all()
    (output,) = harness.step([(request, 1)])
    assert not output.any()


def test_sliding_windows_are_not_routed(model):
    harness = LayerHarness(
        model, settings=settings_of("dense", -2.0), backend="dense", layer_index=2, per_layer_sliding_window=64
    )
    request = harness.request(300)
    harness.step([(request, 300)])
    (output,) = harness.step([(request, 1)])
    assert output.any(dim=-1).all()


def test_learned_sinks_are_refused(model):
    with pytest.raises(ConfigurationError, match="got learned attention sinks, allowed with routing: models without"):
        LayerHarness(
            model, settings=settings_of("dense", 0.5), backend="dense", layer_index=2, sinks=torch.randn(8).bfloat16()
        )


def test_what_is_skipped_reaches_the_metrics(model, monkeypatch):
    for name in (live._VLLM_FOLDER, live._OUR_FOLDER):
        monkeypatch.delenv(name, raising=False)
    registry = CollectorRegistry()
    monkeypatch.setattr(live, "REGISTRY", registry)
    live.expose()
    harness = LayerHarness(model, settings=settings_of("dense", [0.0] * 8), backend="dense", layer_index=4)
    request = harness.request(300)
    harness.step([(request, 300)])
    skipped = torch.zeros(HEADS)
    # Counts are copied at the next multiple, and published at the one after.
    for _ in range(live.COUNTED_STEPS - 2):
        harness.step([(request, 1)])
        skipped += (scores_of(request)[0] >= 0).float()
    for _ in range(live.COUNTED_STEPS + 1):
        harness.step([(request, 1)])
    for head in range(HEADS):
        where = {"layer": "4", "kv_head": str(head)}
        assert registry.get_sample_value("vllm_sparse_group_skipped_count", where) == live.COUNTED_STEPS - 2
        assert registry.get_sample_value("vllm_sparse_group_skipped_sum", where) == skipped[head]
    assert 0 < skipped.sum() < HEADS * (live.COUNTED_STEPS - 2)
