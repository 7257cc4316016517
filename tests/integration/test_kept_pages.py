"""Steps of a draft on a CPU that read the pages of an earlier step."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sparse_kernels.split_attention import cpu as decode_cpu
from support.layer import SMALL, LayerHarness
from support.paged import dense_attention

from vllm_sparse_plugin.config import DraftRule
from vllm_sparse_plugin.lossless.drafter import SparseDrafter

SETTINGS = SMALL | {"lossless": {"draft_tokens": 8, "draft_length": "fixed", "score_every": 6}}
PROMPTS = (299, 520, 406)
"""Contexts that complete a page in the first, the last and the fifth step."""


@pytest.fixture
def drafting(model):
    """A layer with requests behind their prompts, a step of their draft, and the pages chosen in the first step."""
    harness = LayerHarness(model, settings=SETTINGS)
    requests = [harness.request(prompt) for prompt in PROMPTS]
    for request in requests:
        harness.step([(request, request.prompt_tokens)])

    def step(index, requests=requests):
        builder = harness.builder
        builder.build = lambda _, common: type(builder).build_for_drafting(builder, common, index)
        return harness.step([(request, 1) for request in requests])

    return harness, requests, step


def attended(harness, request, pages, since):
    """Attention to the given pages of each KV head, and to every token from position `since`."""
    context = len(request.keys)
    visible = torch.zeros(harness.num_kv_heads, context, dtype=torch.bool)
    for head, listed in enumerate(pages.tolist()):
        for page in listed:
            visible[head, 8 * page : 8 * page + 8] = True
    visible[:, since:] = True
    heads = request.fresh[0].unflatten(0, (harness.num_kv_heads, -1))
    return dense_attention(heads, request.keys, request.values, harness.layer.impl.scale, visible)


def test_steps_read_the_pages_of_the_first_and_those_completed_since(drafting, monkeypatch):
    harness, requests, step = drafting
    step(0)
    chosen = harness.metadata.decode.chosen[harness.layer.layer_name]
    since = [len(request.keys) // 8 * 8 for request in requests]
    for index in range(1, 6):
        # Drafts of later requests may be shorter.
        count = 3 if index < 4 else 2
        with monkeypatch.context() as reading:
            reading.setattr(decode_cpu, "score_pages", lambda *_: pytest.fail("chose pages"))
            outputs = step(index, requests[:count])
        for output, request, pages, begin in zip(outputs, requests, chosen, since, strict=False):
            expected = attended(harness, request, pages, begin)
            torch.testing.assert_close(output[0].double(), expected, atol=2e-2, rtol=0)
            assert not torch.allclose(output[0].double(), attended(harness, request, pages, 10**6), atol=2e-2)
    step(6, requests[:2])
    assert harness.metadata.decode.chosen[harness.layer.layer_name].shape[0] == 2


def test_a_layer_reads_what_its_anchor_kept(drafting):
    harness, requests, step = drafting
    impl, name = harness.layer.impl, harness.layer.layer_name
    step(0)
    harness.builder.chosen.chosen = {"anchor": harness.builder.chosen.chosen[name].flip(1)}
    impl.plan = replace(impl.plan, anchor="anchor", anchor_heads=torch.tensor([1, 0]))
    pages, since = harness.builder.chosen.chosen["anchor"].flip(1), [len(request.keys) // 8 * 8 for request in requests]
    for output, request, listed, begin in zip(step(1), requests, pages, since, strict=True):
        expected = attended(harness, request, listed, begin)
        torch.testing.assert_close(output[0].double(), expected, atol=2e-2, rtol=0)


def test_the_requests_of_a_step_are_the_first_ones_of_the_step_before(monkeypatch):
    """A step finds its pages by place."""
    drafter, asked = object.__new__(SparseDrafter), []
    drafter.rule, drafter.watch = DraftRule(4, 0), None
    table = SimpleNamespace(num_blocks_per_row=torch.tensor([1, 3, 2, 9]), block_size=8)
    drafter.runner = lambda: SimpleNamespace(
        input_batch=SimpleNamespace(block_table=SimpleNamespace(block_tables=[table])), max_model_len=100
    )

    def step(runner, requests, tokens, positions, index):
        asked.append(requests)
        assert positions.tolist() == [[7, 19, 15, 22][request] - 1 + index for request in requests]
        return [10 * request + index for request in requests]

    monkeypatch.setattr(drafter, "_step", step)
    lengths = torch.tensor([7, 19, 15, 22]).numpy()
    drafts = drafter.propose([[1], [1], [1], [1]], lengths, torch.zeros(4, 100, dtype=torch.int32).numpy())
    assert drafts == [[0, 1], [10, 11, 12, 13], [20, 21], [30, 31, 32, 33]]
    assert asked == [[1, 3, 0, 2], [1, 3, 0, 2], [1, 3], [1, 3]]
