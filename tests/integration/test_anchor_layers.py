"""Layers on a CPU that read the pages of another layer."""

from dataclasses import replace

import pytest
import torch
from sparse_kernels.split_attention import cpu as decode_cpu
from support.layer import SMALL, LayerHarness
from support.paged import dense_attention


@pytest.fixture
def step(model):
    """A layer, its requests and a decoding step of them."""
    harness = LayerHarness(model, settings=SMALL)
    requests = [harness.request(300), harness.request(40), harness.request(520)]
    for request in requests:
        harness.step([(request, request.prompt_tokens)])
    impl = harness.layer.impl
    impl.plan = replace(impl.plan, is_anchor=True)
    outputs = harness.step([(request, 1) for request in requests])
    return harness, requests, torch.cat(outputs)


def follow(harness, requests) -> torch.Tensor:
    """The output of the layer behind, which has the same queries, keys and values."""
    impl = harness.layer.impl
    impl.plan = replace(impl.plan, is_anchor=False, anchor=harness.layer.layer_name)
    query = torch.cat([request.fresh for request in requests])
    new = [torch.cat([getattr(request, name)[-1:] for request in requests]) for name in ("keys", "values")]
    output = torch.full_like(query, torch.nan)
    return impl.forward(harness.layer, query, *new, harness.cache, harness.metadata, output)


def test_a_layer_reads_the_pages_of_its_anchor(step, monkeypatch):
    harness, requests, output = step
    monkeypatch.setattr(decode_cpu, "score_pages", lambda *_: pytest.fail("chose pages"))
    assert torch.equal(follow(harness, requests), output)


def test_other_pages_give_another_output(step):
    harness, requests, output = step
    decode, name = harness.metadata.decode, harness.layer.layer_name
    decode.chosen[name] = torch.full_like(decode.chosen[name], -1)
    decode.chosen[name][..., 0] = 0
    behind = follow(harness, requests)
    for place, request in ((0, requests[0]), (2, requests[2])):
        context = len(request.keys)
        visible = torch.zeros(harness.num_kv_heads, context, dtype=torch.bool)
        visible[:, :8] = visible[:, context // 8 * 8 :] = True
        heads = request.fresh[0].unflatten(0, (harness.num_kv_heads, -1))
        expected = dense_attention(heads, request.keys, request.values, harness.layer.impl.scale, visible)
        torch.testing.assert_close(behind[place].double(), expected, atol=2e-2, rtol=0)
        assert not torch.allclose(behind[place], output[place], atol=2e-2)
    # This one has no more pages than its budget.
    assert torch.equal(behind[1], output[1])
