"""Layers that read the pages of another layer."""

from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.cuda_layer import BLOCK, SCALES, budgets_of, common_metadata, run

from vllm_sparse_plugin.attention.cuda.metadata import ChosenPages

LENGTHS = [300, 40, 500, 600, 200]
FOLLOWER = SimpleNamespace(**{**vars(SCALES), "layer_name": "follower"})


def follow(layer, builder, common, change=None, heads=None):
    """The outputs of an anchor and of the layer behind it, which has the same queries, keys and values."""
    follower = copy(layer)
    follower.bind(replace(layer.plan, anchor="layer", anchor_heads=heads, is_anchor=False))
    layer.bind(replace(layer.plan, is_anchor=True))
    outputs = []

    def then(query, new, cache, metadata):
        # A layer that reads pages of another layer reads no statistics.
        cache[:, :, BLOCK:] = torch.nan
        if change is not None:
            change(metadata)
        outputs.append(torch.full_like(query, torch.nan))
        follower.forward(FOLLOWER, query, *new, cache, metadata, outputs[0])

    output, whole, metadata = run(layer, builder, common, then=then)
    decoding = slice(0, metadata.num_decode_tokens)
    return output[decoding], outputs[0].float()[decoding], whole[decoding]


@pytest.mark.parametrize("layer", ["unique", "quest", "infllm", "mean"], indirect=True)
def test_a_layer_reads_the_pages_of_its_anchor(layer, builder):
    common = common_metadata([4, 4, 1, 1, 70], LENGTHS, [False, False, False, True, True])
    anchor, follower, whole = follow(layer, builder, common)
    assert torch.equal(anchor, follower)
    assert not torch.allclose(anchor, whole, atol=1e-2)


def test_a_layer_reads_as_many_pages_as_its_anchor_where_requests_have_budgets(layer, builder):
    layer.bind(replace(layer.plan, most_pages=1024))
    builder.budgets = budgets_of("unique", None, {"sparse_budget_tokens": 128}, {"sparse": "dense"}, None)
    anchor, follower, whole = follow(layer, builder, common_metadata([1] * 4, [300, 400, 500, 600], [False] * 4))
    assert torch.equal(anchor, follower)
    assert torch.allclose(anchor[2], whole[2], atol=2e-2)
    assert not torch.allclose(anchor[1], whole[1], atol=2e-2)


def test_other_pages_give_another_output(layer, builder):
    """The anchor's pages, and nothing else, decide the output."""

    def oldest(metadata):
        for key, chosen in metadata.chosen.items():
            pages = torch.arange(chosen.pages.shape[2], dtype=torch.int32).expand_as(chosen.pages).contiguous()
            metadata.chosen[key] = chosen._replace(pages=pages)

    common = common_metadata([1] * 4, [300, 400, 500, 600], [False] * 4)
    anchor, follower, _ = follow(layer, builder, common, oldest)
    assert not torch.allclose(anchor, follower, atol=1e-2)


def test_a_kv_head_reads_the_pages_of_the_head_that_it_is_paired_with(layer, builder):
    def of_first_head(metadata):
        for key, chosen in metadata.chosen.items():
            first = chosen.pages[:, :1].expand_as(chosen.pages).contiguous()
            metadata.chosen[key] = chosen._replace(pages=first)

    common = common_metadata([1] * 4, [300, 400, 500, 600], [False] * 4)
    _, expected, _ = follow(layer, builder, common, of_first_head)
    _, paired, _ = follow(layer, builder, common, heads=torch.tensor([0, 0]))
    assert torch.equal(paired, expected)
    _, same, _ = follow(layer, builder, common)
    assert not torch.allclose(paired, same, atol=1e-2)


def test_pages_follow_their_heads_and_budgets_their_requests():
    pages, budgets = torch.arange(12, dtype=torch.int32).view(2, 2, 3), torch.tensor([5, 6], dtype=torch.int32)
    swapped = ChosenPages(pages, budgets).of_heads(torch.tensor([1, 0]))
    assert swapped.pages.tolist() == [[[3, 4, 5], [0, 1, 2]], [[9, 10, 11], [6, 7, 8]]]
    assert swapped.budgets is budgets
